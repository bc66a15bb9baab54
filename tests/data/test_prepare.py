"""Preparing gives every document once, the same whatever interrupts it, and refuses the rest."""

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


def test_order_is_of_the_seed_not_of_buckets_or_shards(corpus, source, tmp_path, monkeypatch):
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
  """Ends the preparation as a signal would."""


def test_interrupted_anywhere_gives_the_same(source, tmp_path, monkeypatch):
  settings = dict(validation=0.2, shard_tokens=1000)
  manifest = prepare.prepare(source, tmp_path / "whole", BYTES, **settings)
  shards = len(manifest.train.shards + manifest.validation.shards)
  want = contents(tmp_path / "whole")
  crashes = 0
  for last in range(100):
    calls = iter(range(last + 1))

    def sync(path):
      if next(calls) == last:
        raise Stopped

    output = tmp_path / f"{last}"
    # Every file is made durable before it gets its name, so these are all states of the disk.
    with monkeypatch.context() as patch:
      patch.setattr(files, "sync", sync)
      try:
        prepare.prepare(source, output, BYTES, **settings)
        break
      except Stopped:
        crashes += 1
    with pytest.raises(FileNotFoundError, match="did not finish"):
      open_corpus(output)
    prepare.prepare(source, output, BYTES, **settings)
    assert contents(output) == want
  # One bucket, what is in it, per shard two files and the list of shards, the manifest.
  assert crashes == 2 + 3 * shards + 1 > 12


def test_resuming_skips_finished_shards(source, tmp_path, monkeypatch):
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
  finished = json.loads((tmp_path / "a/.partial/shards.json").read_text())
  count = sum(shard["documents"] for split in finished.values() for shard in split)
  assert count > 10
  before = sum(encoded)
  encoded[:] = []
  monkeypatch.setattr(prepare, "_GROUP", 10**6)
  manifest = prepare.prepare(source, tmp_path / "a", Counting(), **SETTINGS)
  assert sum(encoded) == manifest.train.documents + manifest.validation.documents - count
  assert before >= count


def test_again_checks_and_other_settings_are_refused(corpus, source, tmp_path):
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
  with pytest.raises(ValueError, match="another checksum"):
    prepare.prepare(source, folder, BYTES, **SETTINGS)


def test_unfinished_work_of_others_or_damaged_is_refused(source, tmp_path, monkeypatch):
  def stop(*_):
    raise Stopped

  with monkeypatch.context() as patch:
    patch.setattr(prepare, "_write_shard", stop)
    with pytest.raises(Stopped):
      prepare.prepare(source, tmp_path / "a", BYTES, **SETTINGS)
  with pytest.raises(ValueError, match=r"begun, with other settings \(seed\)"):
    prepare.prepare(source, tmp_path / "a", BYTES, seed=2, **SETTINGS)
  (tmp_path / "a/.partial/train/bucket-000").write_bytes(b"short")
  with pytest.raises(ValueError, match="has lost data"):
    prepare.prepare(source, tmp_path / "a", BYTES, **SETTINGS)


def test_foreign_and_busy_outputs_are_refused(source, tmp_path):
  (tmp_path / "thesis.tex").write_text("precious")
  with pytest.raises(ValueError, match=r"something else, like thesis\.tex"):
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
    (lambda p: p.write_bytes(p.read_bytes()[:-2]), r"bin is of \d+ bytes, expected"),
    (lambda p: p.write_bytes(b"!" + p.read_bytes()[1:]), "another checksum"),
    (lambda p: p.unlink(), "is missing, expected"),
    (lambda p: p.with_suffix(".idx").write_bytes(b""), "idx is of 0 bytes"),
    (lambda p: (p.parent / "manifest.json").unlink(), "has no manifest.json"),
    (lambda p: (p.parent / "manifest.json").write_text("{"), "is damaged"),
    (
      lambda p: (p.parent / "manifest.json").write_text('{"recipe": {"version": 9}}'),
      "has format 9, this program reads 2",
    ),
  ],
)
def test_damage_is_found(corpus, tmp_path, damage, message):
  folder = tmp_path / "copy"
  shutil.copytree(corpus.train.folder, folder)
  damage(folder / "train-00001.bin")
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    open_corpus(folder)


def test_checksums_of_a_large_corpus_are_compared_when_asked(corpus, tmp_path, monkeypatch):
  folder = tmp_path / "copy"
  shutil.copytree(corpus.train.folder, folder)
  path = folder / "train-00001.bin"
  path.write_bytes(b"!" + path.read_bytes()[1:])
  monkeypatch.setattr("deltanet_jax.data.corpus.shards._ALWAYS_VERIFIED", 100)
  open_corpus(folder)
  with pytest.raises(ValueError, match="another checksum"):
    open_corpus(folder, verify=True)


def test_another_tokenizer_is_refused(corpus):
  class Other(type(BYTES)):
    hash = "0" * 64

  assert open_corpus(corpus.train.folder, tokenizer=BYTES).manifest == corpus.manifest
  with pytest.raises(ValueError, match=r"'bytes' of hash .* not 'bytes' of 000000000000"):
    open_corpus(corpus.train.folder, tokenizer=Other())


def test_a_vocabulary_above_16_bits_takes_32(source, corpus, tmp_path):
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
    ([], {}, "no document with text .0 without."),
    (["", "  "], {}, "no document with text .2 without."),
    (["one"], {}, "only document has no line or word where a share of 0.01"),
    (["one", "two"], dict(validation=1.0), "validation is 1.0"),
    (["one", "two"], dict(shard_tokens=0), "shard_tokens is 0"),
  ],
)
def test_input_that_gives_nothing_is_refused(tmp_path, texts, settings, message):
  write_jsonl(tmp_path / "in.jsonl", texts)
  with pytest.raises(ValueError, match=message):
    prepare.prepare(tmp_path / "in.jsonl", tmp_path / "out", BYTES, **settings)
  # Nothing stands in the way of a second try with better input.
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


def held_out(tmp_path, texts, **settings):
  """Texts of both splits, bytes of validation over all bytes, and the corpus."""
  write_jsonl(tmp_path / "in.jsonl", texts)
  prepare.prepare(tmp_path / "in.jsonl", tmp_path / "out", BYTES, **settings)
  corpus = open_corpus(tmp_path / "out")
  share = corpus.validation.bytes / (corpus.validation.bytes + corpus.train.bytes)
  return share, corpus


PARAGRAPHS = "\n\n".join(f"Paragraph {i} has some words.\nAnd a line." for i in range(400))


@pytest.mark.parametrize("seed", range(4))
def test_validation_is_a_share_of_the_text(tmp_path, seed):
  """Whichever of two unequal files comes first; documents were counted once, and 76 % held out."""
  texts = [PARAGRAPHS, PARAGRAPHS[: len(PARAGRAPHS) // 3]]
  share, corpus = held_out(tmp_path, texts, validation=0.1, seed=seed)
  assert abs(share - 0.1) < 0.01
  assert corpus.train.bytes + corpus.validation.bytes == sum(map(len, texts))


def test_one_big_document_is_cut_between_paragraphs(tmp_path):
  share, corpus = held_out(tmp_path, [PARAGRAPHS], validation=0.1)
  assert abs(share - 0.1) < 0.01
  (train, validation) = (
    BYTES.decode(split.read(0, split.tokens)[0]) for split in (corpus.train, corpus.validation)
  )
  assert train + validation == PARAGRAPHS
  assert train.endswith("\n\n") and validation.startswith("Paragraph")
  # Only what is the end of the document says so.
  assert corpus.train.read(0, corpus.train.tokens)[0][-1] == ord("\n")
  assert corpus.validation.read(0, corpus.validation.tokens)[0][-1] == BYTES.eos


@pytest.mark.parametrize("border", ["\n", " "])
def test_without_paragraphs_lines_and_then_words_are_cut(tmp_path, border):
  share, corpus = held_out(tmp_path, [border.join(["word"] * 1000)], validation=0.1)
  assert abs(share - 0.1) < 0.01
  assert corpus.train.read(0, corpus.train.tokens)[0][-1] == ord(border)


def test_shipped_validation_is_the_same_eight_chapters(tmp_path):
  manifest = prepare.prepare(shipped_corpus(), tmp_path / "out", BYTES, validation=0.1)
  assert (manifest.validation.documents, manifest.validation.bytes) == (8, 115_151)
  assert (manifest.train.documents, manifest.train.bytes) == (77, 1_150_197 - 115_151)


def test_validation_with_input_of_its_own(source, texts, tmp_path):
  (tmp_path / "held.txt").write_text("held out by hand")
  run = lambda: prepare.prepare(source, tmp_path / "a", BYTES, validation=tmp_path / "held.txt")
  run()
  corpus = open_corpus(tmp_path / "a")
  assert documents(corpus.validation) == ["held out by hand"]
  assert sorted(documents(corpus.train)) == sorted(texts)
  (tmp_path / "held.txt").write_text("held out by mind")
  with pytest.raises(ValueError, match=r"other settings \(validation_sources\)"):
    run()


def test_sources_are_known_by_content_not_by_name_and_size(tmp_path):
  path = tmp_path / "in.txt"
  run = lambda path: prepare.prepare(path, tmp_path / "out", BYTES, validation=0.0)
  path.write_text("all of it")
  run(path)
  run(path.rename(tmp_path / "renamed.txt"))
  path.write_text("none o it")
  with pytest.raises(ValueError, match=r"other settings \(sources\)"):
    run(path)


def test_what_is_left_out_is_said(tmp_path):
  folder = tmp_path / "in"
  folder.mkdir()
  for i in range(7):
    (folder / f"{i}.png").write_bytes(b"\0")
  (folder / "a.txt").write_text("some text here")
  said = []
  prepare.prepare(folder, tmp_path / "out", BYTES, validation=0.0, report=said.append)
  (line,) = said
  assert "1 files are read, 7 are left out: 0.png, 1.png" in line and "and 2 more" in line


def test_without_eos(tmp_path):
  _, corpus = held_out(tmp_path, ["one", "two", "three"], validation=0.3, eos=False)
  assert corpus.manifest.recipe.eos is None
  assert corpus.train.tokens == corpus.train.bytes + corpus.train.documents

  class Endless(type(BYTES)):
    eos = None

  with pytest.raises(ValueError, match="has no eos for documents: set eos=False"):
    prepare.prepare(tmp_path / "in.jsonl", tmp_path / "b", Endless())


def test_unfinished_work_of_another_version_is_refused(source, tmp_path):
  (tmp_path / "a/.partial").mkdir(parents=True)
  (tmp_path / "a/.partial/dealt.json").write_text('{"recipe": {"version": 1}}')
  with pytest.raises(ValueError, match="begun by another version"):
    prepare.prepare(source, tmp_path / "a", BYTES)


def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(source, tmp_path, monkeypatch):
  def full(path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    patch.setattr(files, "sync", full)
    with pytest.raises(OSError, match=r"/a cannot be .* \(No space left on device\): .* goes on"):
      prepare.prepare(source, tmp_path / "a", BYTES)
  assert prepare.prepare(source, tmp_path / "a", BYTES).train.documents


def test_documents_spread_over_buckets(source, tmp_path, monkeypatch):
  monkeypatch.setattr(shuffle, "_BUCKET", 500)
  dealt = shuffle.deal(find_sources(source)[0], "text", 0, tmp_path)
  sizes = [p.stat().st_size for p in tmp_path.iterdir()]
  assert dealt.buckets == len(sizes) > 8
  assert sum(size > 0 for size in sizes) > dealt.buckets / 2
