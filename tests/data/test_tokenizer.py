"""Text survives the tokenizers, whose ids are what the models were trained with."""

import importlib.util

import numpy as np
import pytest

from deltanet_jax.data import load_tokenizer

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
  assert (tokenizer.vocab, tokenizer.bos, tokenizer.eos) == (257, 256, None)
  assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
  assert tokenizer.decode([0x61, 0xC3]) == "a\ufffd"


@pytest.mark.skipif(bool(MISSING), reason=f"needs the extra `data`: {MISSING}")
def test_mistral_is_the_real_one():
  tokenizer = load_tokenizer("mistral")
  assert (tokenizer.vocab, tokenizer.bos, tokenizer.eos) == (32000, 1, 2)
  assert tokenizer.encode("Hello").tolist() == [22557]
  assert tokenizer.encode(" Hello").tolist() == [28705, 22557]
  assert tokenizer.hash == "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"


def test_missing_packages_and_names(monkeypatch):
  with pytest.raises(ValueError, match="expected one of"):
    load_tokenizer("gpt2")
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"deltanet-jax\[data\]"):
    load_tokenizer("mistral")
