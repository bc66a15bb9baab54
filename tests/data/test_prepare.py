"""Corpus preparation: every document once, resumable, deterministic; errors for bad input."""

import dataclasses
import errno
import json
import os
import shutil

import numpy as np
import pytest

from deltanet_jax import files
from deltanet_jax.data import load_tokenizer, open_corpus, shipped_corpus
from deltanet_jax.data.corpus import prepare, shuffle
from deltanet_jax.data.corpus.sequences import evaluation_batches
from deltanet_jax.data.corpus.text import find_sources
from tests.data.conftest import write_jsonl

BYTES = load_tokenizer("bytes")
SETTINGS = dict(validation=0.2, shard_tokens=300)


def contents(folder):
  return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def documents(split):
  tokens, number = split.read(0, split.tokens)
  parts = np.split(tokens, np.flatnonzero(np.diff(number)) + 1)
  assert all(part[0] == 256 and part[-1] == 257 for part in parts)
  return [BYTES.decode(part) for part in parts]


def test_every_document_once_and_counted(corpus, texts):
  train, validation = documents(corpus.train), documents(corpus.validation)
  assert sorted(train + validation) == sorted(texts)
  total = sum(len(text.encode()) for text in texts)
  assert abs(corpus.validation.bytes / total - 0.2) < 0.02
  assert train != sorted(train, key=texts.index)
  for split, found in ((corpus.train, train), (corpus.validation, validation)):
    assert split.bytes == sum(len(text.encode()) for text in found)
    assert split.tokens == split.bytes + 2 * split.documents
    assert split.documents == len(found)
  assert corpus.manifest.dropped == 6
  assert corpus.manifest.recipe.sources[0][0] == "0.jsonl"


def test_order_depends_on_the_seed_not_on_buckets_or_shards(corpus, source, tmp_path, monkeypatch):
  want = documents(corpus.train)
  monkeypatch.setattr(shuffle, "_BUCKET", 500)
  prepare.prepare(source, tmp_path / "a", BYTES, validation=0.2, shard_tokens=10**6)
  one = open_corpus(tmp_path / "a")
  assert len(one.train.info.shards) == 1
  assert documents(one.train) == want
  prepare.prepare(source, tmp_path / "b", BYTES, seed=1, **SETTINGS)
  other = open_corpus(tmp_path / "b")
  assert documents(other.train) != want
  assert sorted(documents(other.train) + documents(other.validation)) == sorted(
    want + documents(corpus.validation)
  )


class Stopped(BaseException):
  """Interrupts the preparation like a signal."""


def test_resuming_after_any_interruption_gives_identical_files(source, tmp_path, monkeypatch):
  settings = dict(validation=0.2, shard_tokens=1000)
  manifest = prepare.prepare(source, tmp_path / "uninterrupted", BYTES, **settings)
  shards = len(manifest.train.shards + manifest.validation.shards)
  want = contents(tmp_path / "uninterrupted")
  crashes = 0
  for last in range(100):
    calls = iter(range(last + 1))

    def sync(path):
      if next(calls) == last:
        raise Stopped

    output = tmp_path / f"{last}"
    # Every file is synced before it is renamed, so these are all states of the disk.
    with monkeypatch.context() as patch:
      patch.setattr(files, "sync", sync)
      try:
        prepare.prepare(source, output, BYTES, **settings)
        break
      except Stopped:
        crashes += 1
    with pytest.raises(FileNotFoundError, match="preparation is incomplete"):
      open_corpus(output)
    prepare.prepare(source, output, BYTES, **settings)
    assert contents(output) == want
  # One bucket, its record, two files and the list of shards per shard, the manifest.
  assert crashes == 2 + 3 * shards + 1 > 12


def test_resuming_skips_completed_shards(source, tmp_path, monkeypatch):
  encoded = []

  class Counting(type(BYTES)):
    def encode_many(self, texts):
      if len(encoded) == 6:
        raise Stopped
      encoded.append(len(texts))
      return super().encode_many(texts)

  monkeypatch.setattr(prepare, "_GROUP", 400)
  with pytest.raises(Stopped):
    prepare.prepare(source, tmp_path / "a", Counting(), **SETTINGS)
  completed = json.loads((tmp_path / "a/.partial/shards.json").read_text())
  count = sum(shard["documents"] for split in completed.values() for shard in split)
  assert count > 10
  before = sum(encoded)
  encoded[:] = []
  monkeypatch.setattr(prepare, "_GROUP", 10**6)
  manifest = prepare.prepare(source, tmp_path / "a", Counting(), **SETTINGS)
  assert sum(encoded) == manifest.train.documents + manifest.validation.documents - count
  assert before >= count


def test_rerunning_verifies_and_other_settings_raise(corpus, source, tmp_path):
  folder = tmp_path / "copy"
  shutil.copytree(corpus.train.folder, folder)
  before = contents(folder)
  prepare.prepare(source, folder, BYTES, **SETTINGS)
  with pytest.raises(ValueError, match=r"other settings \(seed\)"):
    prepare.prepare(source, folder, BYTES, seed=2, **SETTINGS)
  with pytest.raises(ValueError, match=r"other settings \(sources\)"):
    prepare.prepare(source / "0.jsonl", folder, BYTES, **SETTINGS)
  assert contents(folder) == before
  path = folder / "train-00000.bin"
  path.write_bytes(b"!" + path.read_bytes()[1:])
  with pytest.raises(ValueError, match="does not match its checksum"):
    prepare.prepare(source, folder, BYTES, **SETTINGS)


def test_incomplete_output_with_other_settings_or_damage_raises(source, tmp_path, monkeypatch):
  def stop(*_):
    raise Stopped

  with monkeypatch.context() as patch:
    patch.setattr(prepare, "_write_shard", stop)
    with pytest.raises(Stopped):
      prepare.prepare(source, tmp_path / "a", BYTES, **SETTINGS)
  with pytest.raises(ValueError, match=r"other settings \(seed\)"):
    prepare.prepare(source, tmp_path / "a", BYTES, seed=2, **SETTINGS)
  (tmp_path / "a/.partial/train/bucket-000").write_bytes(b"short")
  with pytest.raises(ValueError, match="partial is incomplete"):
    prepare.prepare(source, tmp_path / "a", BYTES, **SETTINGS)


def test_unrelated_and_locked_outputs_raise(source, tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  with pytest.raises(ValueError, match=r"unrelated files such as thesis\.tex"):
    prepare.prepare(source, tmp_path, BYTES)
  with pytest.raises(ValueError, match="is a file"):
    prepare.prepare(source, tmp_path / "thesis.tex", BYTES)
  assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
  (tmp_path / "a/.partial").mkdir(parents=True)
  with (
    files.locked(tmp_path / "a/.partial/lock"),
    pytest.raises(ValueError, match=r"a is in use by process \d+ on .*: wait until it ends"),
  ):
    prepare.prepare(source, tmp_path / "a", BYTES)


@pytest.mark.parametrize(
  "damage,message",
  [
    (lambda p: p.write_bytes(p.read_bytes()[:-2]), r"bin has \d+ bytes, expected"),
    (lambda p: p.write_bytes(b"!" + p.read_bytes()[1:]), "does not match its checksum"),
    (lambda p: p.unlink(), "is missing, expected"),
    (lambda p: p.with_suffix(".idx").write_bytes(b""), "idx has 0 bytes"),
    (lambda p: (p.parent / "manifest.json").unlink(), "has no manifest.json"),
    (lambda p: (p.parent / "manifest.json").write_text("{"), "is damaged"),
    (
      lambda p: (p.parent / "manifest.json").write_text('{"recipe": {"version": 9}}'),
      "has format version 9, expected 2",
    ),
  ],
)
def test_damage_is_detected(corpus, tmp_path, damage, message):
  folder = tmp_path / "copy"
  shutil.copytree(corpus.train.folder, folder)
  damage(folder / "train-00001.bin")
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    open_corpus(folder)


def test_checksums_of_a_large_corpus_are_verified_on_request(corpus, tmp_path, monkeypatch):
  folder = tmp_path / "copy"
  shutil.copytree(corpus.train.folder, folder)
  path = folder / "train-00001.bin"
  path.write_bytes(b"!" + path.read_bytes()[1:])
  monkeypatch.setattr("deltanet_jax.data.corpus.shards._ALWAYS_VERIFIED", 100)
  open_corpus(folder)
  with pytest.raises(ValueError, match="does not match its checksum"):
    open_corpus(folder, verify=True)


def test_another_tokenizer_raises(corpus):
  class Other(type(BYTES)):
    hash = "0" * 64

  assert open_corpus(corpus.train.folder, tokenizer=BYTES).manifest == corpus.manifest
  with pytest.raises(ValueError, match=r"'bytes' \(hash .* 'bytes' \(hash 000000000000"):
    open_corpus(corpus.train.folder, tokenizer=Other())


def test_a_vocabulary_above_16_bits_is_stored_in_32(source, corpus, tmp_path):
  class Wide(type(BYTES)):
    vocab = 65537

    def encode_many(self, texts):
      return [ids + 65000 for ids in super().encode_many(texts)]

  prepare.prepare(source, tmp_path / "a", Wide(), **SETTINGS)
  train = open_corpus(tmp_path / "a").train
  tokens, number = train.read(0, train.tokens)
  want = corpus.train.read(0, corpus.train.tokens)
  np.testing.assert_array_equal(np.where(tokens >= 65000, tokens - 65000, tokens), want[0])
  np.testing.assert_array_equal(number, want[1])


@pytest.mark.parametrize(
  "texts,settings,message",
  [
    ([], {}, r"in\.jsonl has no text .empty documents: 0"),
    (["", "  "], {}, r"in\.jsonl has no text .empty documents: 2"),
    (["one"], {}, "only document has no line or word boundary .* fraction of 0.01"),
    (["one", "two"], dict(validation=1.0), "validation is 1.0"),
    (["one", "two"], dict(shard_tokens=0), "shard_tokens is 0"),
  ],
)
def test_input_without_text_raises(tmp_path, texts, settings, message):
  write_jsonl(tmp_path / "in.jsonl", texts)
  with pytest.raises(ValueError, match=message):
    prepare.prepare(tmp_path / "in.jsonl", tmp_path / "out", BYTES, **settings)
  # A second attempt with valid input succeeds.
  write_jsonl(tmp_path / "in.jsonl", ["one", "two", "three"])
  assert prepare.prepare(tmp_path / "in.jsonl", tmp_path / "out", BYTES).train.documents == 2


def test_without_validation(tmp_path):
  (tmp_path / "in.txt").write_text("all of it")
  prepare.prepare(tmp_path / "in.txt", tmp_path / "out", BYTES, validation=0.0)
  corpus = open_corpus(tmp_path / "out")
  assert documents(corpus.train) == ["all of it"]
  assert dataclasses.astuple(corpus.manifest.validation) == (0, 0, 0, [])
  with pytest.raises(ValueError, match="'validation' has no text"):
    evaluation_batches(corpus.validation, length=8, batch=1)


def prepare_split(tmp_path, texts, **settings):
  """Return the fraction of the bytes in the validation split, and the corpus."""
  write_jsonl(tmp_path / "in.jsonl", texts)
  prepare.prepare(tmp_path / "in.jsonl", tmp_path / "out", BYTES, **settings)
  corpus = open_corpus(tmp_path / "out")
  fraction = corpus.validation.bytes / (corpus.validation.bytes + corpus.train.bytes)
  return fraction, corpus


PARAGRAPHS = "\n\n".join(f"Paragraph {i} has some words.\nAnd a line." for i in range(400))


@pytest.mark.parametrize("seed", range(4))
def test_validation_is_a_fraction_of_the_bytes(tmp_path, seed):
  """For either order of two unequal documents: a fraction of documents would split off 76%."""
  texts = [PARAGRAPHS, PARAGRAPHS[: len(PARAGRAPHS) // 3]]
  fraction, corpus = prepare_split(tmp_path, texts, validation=0.1, seed=seed)
  assert abs(fraction - 0.1) < 0.01
  assert corpus.train.bytes + corpus.validation.bytes == sum(map(len, texts))


def test_a_single_document_is_cut_between_paragraphs(tmp_path):
  fraction, corpus = prepare_split(tmp_path, [PARAGRAPHS], validation=0.1)
  assert abs(fraction - 0.1) < 0.01
  (train, validation) = (
    BYTES.decode(split.read(0, split.tokens)[0]) for split in (corpus.train, corpus.validation)
  )
  assert train + validation == PARAGRAPHS
  assert train.endswith("\n\n") and validation.startswith("Paragraph")
  # Only the end of the document has EOS.
  assert corpus.train.read(0, corpus.train.tokens)[0][-1] == ord("\n")
  assert corpus.validation.read(0, corpus.validation.tokens)[0][-1] == BYTES.eos


@pytest.mark.parametrize("boundary", ["\n", " "])
def test_without_paragraphs_it_is_cut_between_lines_or_words(tmp_path, boundary):
  fraction, corpus = prepare_split(tmp_path, [boundary.join(["word"] * 1000)], validation=0.1)
  assert abs(fraction - 0.1) < 0.01
  assert corpus.train.read(0, corpus.train.tokens)[0][-1] == ord(boundary)


def test_validation_split_of_the_shipped_corpus_is_stable(tmp_path):
  manifest = prepare.prepare(shipped_corpus(), tmp_path / "out", BYTES, validation=0.1)
  assert (manifest.validation.documents, manifest.validation.bytes) == (8, 115_151)
  assert (manifest.train.documents, manifest.train.bytes) == (77, 1_150_197 - 115_151)


def test_validation_with_separate_input(source, texts, tmp_path):
  path = tmp_path / "validation.txt"
  path.write_text("")
  run = lambda: prepare.prepare(source, tmp_path / "a", BYTES, validation=path)
  with pytest.raises(ValueError, match=r"validation\.txt has no text .empty documents: 1"):
    run()
  path.write_text("separate text")
  run()
  corpus = open_corpus(tmp_path / "a")
  assert documents(corpus.validation) == ["separate text"]
  assert sorted(documents(corpus.train)) == sorted(texts)
  path.write_text("another  text")
  with pytest.raises(ValueError, match=r"other settings \(validation_sources\)"):
    run()


def test_sources_are_compared_by_content_not_by_name_and_size(tmp_path):
  path = tmp_path / "in.txt"
  run = lambda path: prepare.prepare(path, tmp_path / "out", BYTES, validation=0.0)
  path.write_text("all of it")
  run(path)
  run(path.rename(tmp_path / "renamed.txt"))
  path.write_text("none o it")
  with pytest.raises(ValueError, match=r"other settings \(sources\)"):
    run(path)


def test_skipped_files_are_reported(tmp_path):
  folder = tmp_path / "in"
  folder.mkdir()
  for i in range(7):
    (folder / f"{i}.png").write_bytes(b"\0")
  (folder / "a.txt").write_text("some text here")
  reported = []
  prepare.prepare(folder, tmp_path / "out", BYTES, validation=0.0, report=reported.append)
  (line,) = reported
  assert "reading 1 files, skipping 7: 0.png, 1.png" in line and "and 2 more" in line


def test_without_eos(tmp_path):
  _, corpus = prepare_split(tmp_path, ["one", "two", "three"], validation=0.3, eos=False)
  assert corpus.manifest.recipe.eos is None
  assert corpus.train.tokens == corpus.train.bytes + corpus.train.documents

  class NoEos(type(BYTES)):
    eos = None

  with pytest.raises(ValueError, match="has no EOS token: set eos=False"):
    prepare.prepare(tmp_path / "in.jsonl", tmp_path / "b", NoEos())


def test_incomplete_output_of_another_version_raises(source, tmp_path):
  (tmp_path / "a/.partial").mkdir(parents=True)
  (tmp_path / "a/.partial/dealt.json").write_text('{"recipe": {"version": 1}}')
  with pytest.raises(ValueError, match="started by another version"):
    prepare.prepare(source, tmp_path / "a", BYTES)


def test_a_full_disk_raises_and_rerunning_resumes(source, tmp_path, monkeypatch):
  def full(path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    patch.setattr(files, "sync", full)
    with pytest.raises(OSError, match=r"/a cannot be .* \(No space left on device\): .* to resume"):
      prepare.prepare(source, tmp_path / "a", BYTES)
  assert prepare.prepare(source, tmp_path / "a", BYTES).train.documents


def test_documents_are_spread_over_buckets(source, tmp_path, monkeypatch):
  monkeypatch.setattr(shuffle, "_BUCKET", 500)
  info = shuffle.write_buckets(find_sources(source)[0], "text", 0, tmp_path)
  sizes = [p.stat().st_size for p in tmp_path.iterdir()]
  assert info.buckets == len(sizes) > 8
  assert sum(size > 0 for size in sizes) > info.buckets / 2
