"""Tokenizers: round trips, ids of public tokenizers, files, error messages."""

import importlib.util

import numpy as np
import pytest

from deltanet_jax.data import (
  CorpusTask,
  find_tokenizer,
  keep_tokenizer,
  load_tokenizer,
  open_corpus,
  vocabulary_mismatch,
)
from deltanet_jax.data.corpus.prepare import prepare

TEXTS = ["", "Hello", " Hello  world\n\n\tä 漢字 🙂", "<s> is text, </s> too\x01", "\r\n end "]
MISSING = [p for p in ("mistral_common", "sentencepiece") if not importlib.util.find_spec(p)]
mistral = pytest.param(
  "mistral", marks=pytest.mark.skipif(bool(MISSING), reason=f"needs the extra `data`: {MISSING}")
)


@pytest.mark.parametrize("name", ["bytes", mistral])
def test_round_trip(name):
  tokenizer = load_tokenizer(name)
  for text, ids in zip(TEXTS, tokenizer.encode_many(TEXTS), strict=True):
    assert ids.dtype == np.int32 == tokenizer.encode(text).dtype
    np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert not np.isin(ids, [tokenizer.bos, tokenizer.eos or -1]).any()
    assert ids.size == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab
    assert tokenizer.decode(ids) == tokenizer.decode([tokenizer.bos, *ids]) == text
  assert len(tokenizer.hash) == 64


def test_bytes():
  tokenizer = load_tokenizer("bytes")
  assert (tokenizer.vocab, tokenizer.bos, tokenizer.eos) == (258, 256, 257)
  assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
  assert tokenizer.decode([0x61, 0xC3]) == "a\ufffd"


@pytest.mark.skipif(bool(MISSING), reason=f"needs the extra `data`: {MISSING}")
def test_mistral_ids():
  tokenizer = load_tokenizer("mistral")
  assert (tokenizer.vocab, tokenizer.bos, tokenizer.eos) == (32000, 1, 2)
  assert tokenizer.encode("Hello").tolist() == [22557]
  assert tokenizer.encode(" Hello").tolist() == [28705, 22557]
  assert tokenizer.hash == "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"


def test_ids_outside_the_vocabulary_raise():
  for ids in ([97, 258], [300], [-1]):
    with pytest.raises(
      ValueError, match=rf"token id {ids[-1]} is outside the vocabulary of 258 .*'bytes'"
    ):
      load_tokenizer("bytes").decode(ids)


def hugging_face(folder, special="<|endoftext|>", name="tokenizer.json"):
  """Write a small byte-level BPE with truncation to three tokens."""
  tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=special.split(),
    initial_alphabet=alphabet,
    show_progress=False,
  )
  model.train_from_iterator(TEXTS * 4, trainer)
  model.enable_truncation(3)
  model.save(str(folder / name))
  return folder / name


def sentence_piece(folder, name="any.model", **options):
  """Write a small BPE with byte fallback."""
  sentencepiece = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["some words of a text", "more words"] * 20),
    model_prefix=str(folder / name.removesuffix(".model")),
    vocab_size=290,
    model_type="bpe",
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    minloglevel=5,
    hard_vocab_limit=False,
    **options,
  )
  return folder / name


FILES = {"hugging_face": hugging_face, "sentence_piece": sentence_piece}


@pytest.mark.parametrize("kind", FILES)
def test_files_are_loaded_and_saved(kind, tmp_path):
  tokenizer = load_tokenizer(FILES[kind](tmp_path))
  for text, ids in zip(TEXTS, tokenizer.encode_many(TEXTS), strict=True):
    np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert ids.dtype == np.int32 and not np.isin(ids, [tokenizer.bos, tokenizer.eos]).any()
    end = [tokenizer.eos]
    assert tokenizer.decode(ids) == tokenizer.decode([tokenizer.bos, *ids, *end]) == text
  with pytest.raises(ValueError, match=f"token id {tokenizer.vocab} is outside"):
    tokenizer.decode([tokenizer.vocab])
  saved = tmp_path / "saved"
  saved.mkdir()
  keep_tokenizer(tokenizer, saved)
  for again in (load_tokenizer(tokenizer.name, saved), load_tokenizer(find_tokenizer(saved))):
    same = ("name", "vocab", "bos", "eos", "hash")
    assert [getattr(again, x) for x in same] == [getattr(tokenizer, x) for x in same]


def test_bos_and_eos(tmp_path):
  path = hugging_face(tmp_path, "<|endoftext|> <start> </s>")
  assert (load_tokenizer(path).bos, load_tokenizer(path).eos) == (2, 2)
  (tmp_path / "tokenizer_config.json").write_text(
    '{"bos_token": {"content": "<start>"}, "eos_token": "<|endoftext|>", "other": 1}'
  )
  tokenizer = load_tokenizer(tmp_path)
  assert (tokenizer.bos, tokenizer.eos) == (1, 0)
  (tmp_path / "saved").mkdir()
  keep_tokenizer(tokenizer, tmp_path / "saved")
  assert load_tokenizer(tmp_path / "saved").bos == 1
  neither = hugging_face(tmp_path, "", "neither.json")
  (tmp_path / "tokenizer_config.json").unlink()
  with pytest.raises(ValueError, match=r"neither\.json cannot be read.*neither a BOS nor an EOS"):
    load_tokenizer(neither)
  without = load_tokenizer(sentence_piece(tmp_path, bos_id=-1))
  assert without.bos == without.eos is not None


@pytest.mark.parametrize("kind", FILES)
def test_a_corpus_saves_its_tokenizer(kind, tmp_path):
  path = FILES[kind](tmp_path)
  (tmp_path / "in.txt").write_text("Hello world\n\n" * 50)
  prepare(tmp_path / "in.txt", tmp_path / "out", load_tokenizer(path), validation=0.2)
  path.unlink()
  moved = (tmp_path / "out").rename(tmp_path / "moved")
  corpus = open_corpus(moved)
  tokens, _ = corpus.validation.read(0, corpus.validation.tokens)
  assert "Hello world\n\nHello" in corpus.tokenizer().decode(tokens)
  task = CorpusTask(corpus, length=8, batch=1)
  (tmp_path / "run").mkdir()
  task.keep(tmp_path / "run")
  name = task.describe()["tokenizer"]
  assert load_tokenizer(name, tmp_path / "run").hash == corpus.tokenizer().hash
  with open(moved / name, "ab") as file:
    file.write(b" ")
  with pytest.raises(ValueError, match="is missing or was modified"):
    open_corpus(moved)


@pytest.mark.parametrize("name", ["a.json", "a.model"])
def test_other_files_raise(name, tmp_path):
  (tmp_path / name).write_text('{"some": "thing"}')
  with pytest.raises(ValueError, match=f"{name} cannot be read as a tokenizer"):
    load_tokenizer(tmp_path / name)


@pytest.mark.parametrize("name", ["tokenizer.json", "runs/a.model", "runs/a"])
def test_missing_files_raise(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for path in (name, tmp_path / name):
    with pytest.raises(FileNotFoundError, match=f"no such file '.*{name}'"):
      load_tokenizer(path)
  (tmp_path / "folder").mkdir()
  with pytest.raises(FileNotFoundError, match=r"folder has no tokenizer\.json or tokenizer\.model"):
    load_tokenizer("folder")


def test_vocabulary_mismatch():
  for tokenizer, model in ((258, 258), (258, 512), (50257, 50304), (151_665, 152_064)):
    assert vocabulary_mismatch(tokenizer, model) is None
  assert "more than the 257" in vocabulary_mismatch(258, 257)
  assert "258 ids, far fewer than the 32000" in vocabulary_mismatch(258, 32000)


def test_a_task_warns_about_a_vocabulary_mismatch(corpus):
  task = CorpusTask(corpus, length=8, batch=1)
  assert task.remark(258) is None
  assert "far fewer than the 32000 of the model; is model.vocab intended?" in task.remark(32000)


def test_unknown_names_and_missing_packages_raise(monkeypatch):
  with pytest.raises(ValueError, match="expected one of"):
    load_tokenizer("gpt2")
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"deltanet-jax\[data\]"):
    load_tokenizer("mistral")
