"""Text to token ids and back: raw bytes, or the Mistral tokenizer of the paper."""

import hashlib
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

TOKENIZERS = ("bytes", "mistral")


@runtime_checkable
class Tokenizer(Protocol):
  name: str
  vocab: int
  bos: int
  eos: int | None
  hash: str  # sha256 of what defines the ids

  def encode(self, text: str) -> np.ndarray:
    """Ids of a text as int32, without bos."""

  def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids of each text; may use all cores."""

  def decode(self, ids) -> str:
    """The text of ids; bos and eos are left out."""


class BytesTokenizer:
  """Ids 0 to 255 are the bytes of UTF-8, 256 is bos."""

  name = "bytes"
  vocab = 257
  bos = 256
  eos = None
  hash = hashlib.sha256(b"utf-8 bytes, bos 256").hexdigest()

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [self.encode(text) for text in texts]

  def decode(self, ids) -> str:
    ids = np.asarray(ids)
    # A model may stop inside a character: what is no UTF-8 shows as a replacement mark.
    return ids[ids != self.bos].astype(np.uint8).tobytes().decode(errors="replace")


class MistralTokenizer:
  """SentencePiece BPE with byte fallback, 32,000 pieces, as Mistral 7B has it."""

  name = "mistral"

  def __init__(self):
    # mistral_common is only where the file lies: importing it would take seconds.
    package = importlib.util.find_spec("mistral_common")
    if package is None or importlib.util.find_spec("sentencepiece") is None:
      raise ImportError(
        "The Mistral tokenizer needs the packages mistral-common and sentencepiece: "
        'install them with `pip install "deltanet-jax[data]"`.'
      )
    path = pathlib.Path(package.origin).parent / "data" / "tokenizer.model.v1"
    if not path.is_file():
      raise ImportError(
        f"The installed mistral-common has no {path.name}: install the version in constraints.txt."
      )
    import sentencepiece

    content = path.read_bytes()
    self.hash = hashlib.sha256(content).hexdigest()
    self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
    self.vocab = self._model.vocab_size()
    self.bos = self._model.bos_id()
    self.eos = self._model.eos_id()

  def encode(self, text: str) -> np.ndarray:
    return np.asarray(self._model.encode(text), np.int32)

  def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [np.asarray(ids, np.int32) for ids in self._model.encode(list(texts), num_threads=-1)]

  def decode(self, ids) -> str:
    return self._model.decode(np.asarray(ids).tolist())


def load_tokenizer(name: str) -> Tokenizer:
  """The tokenizer called `bytes` or `mistral`."""
  match name:
    case "bytes":
      return BytesTokenizer()
    case "mistral":
      return MistralTokenizer()
  raise ValueError(f"tokenizer is {name!r}, expected one of {TOKENIZERS}.")
