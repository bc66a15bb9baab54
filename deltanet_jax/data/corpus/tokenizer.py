"""Tokenizers: UTF-8 bytes, Mistral (as in the paper), Hugging Face and SentencePiece files."""

import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from deltanet_jax import files

TOKENIZERS = ("bytes", "mistral")
# Supported files, by suffix.
_HUGGING_FACE, _SENTENCE_PIECE = ".json", ".model"
# Names the BOS and EOS tokens; in the same folder as tokenizer.json.
_SPECIAL = "tokenizer_config.json"
# Default names of these tokens without that file, most common first.
_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "[BOS]", "[CLS]")
_EOS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|eos|>", "[EOS]", "[SEP]")


@runtime_checkable
class Tokenizer(Protocol):
  """Encodes and decodes text; `keep_tokenizer` saves one to a folder, `load_tokenizer` loads it."""

  name: str  # one of TOKENIZERS, or its file name as saved by `keep_tokenizer`
  vocab: int
  bos: int
  eos: int | None
  hash: str  # SHA-256 of the tokenizer's definition

  def encode(self, text: str) -> np.ndarray:
    """Return the token ids of a text as int32, without BOS and EOS."""

  def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the token ids of each text; may use all cores."""

  def decode(self, ids) -> str:
    """Return the text of token ids without BOS and EOS; raises for ids outside the vocabulary."""

  def files(self) -> dict[str, bytes]:
    """Return the files that `load_tokenizer` needs, by name; none for one of TOKENIZERS."""


def _checked(ids, tokenizer: Tokenizer) -> np.ndarray:
  ids = np.asarray(ids)
  wrong = ids[(ids < 0) | (ids >= tokenizer.vocab)]
  if wrong.size:
    raise ValueError(
      f"token id {wrong[0]} is outside the vocabulary of {tokenizer.vocab} ids of the tokenizer"
      f" {tokenizer.name!r}: decode with the tokenizer that the model was trained with."
    )
  return ids


class BytesTokenizer:
  """Byte-level tokenizer: ids 0 to 255 are UTF-8 bytes, 256 is BOS, 257 is EOS."""

  name = "bytes"
  vocab = 258
  bos = 256
  eos = 257
  hash = hashlib.sha256(b"utf-8 bytes, bos 256, eos 257").hexdigest()

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [self.encode(text) for text in texts]

  def decode(self, ids) -> str:
    ids = _checked(ids, self)
    # A model may stop inside a character: invalid UTF-8 decodes to the replacement character.
    return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

  def files(self):
    return {}


class SentencePieceTokenizer:
  """SentencePiece model, from the content of its file."""

  def __init__(self, content: bytes, name: str = "tokenizer" + _SENTENCE_PIECE):
    _need("sentencepiece")
    import sentencepiece

    try:
      self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as e:
      raise ValueError("the content is not a SentencePiece model") from e
    self.name, self._content = name, content
    self.hash = hashlib.sha256(content).hexdigest()
    self.vocab = self._model.vocab_size()
    # -1 if the model has no such piece.
    bos, eos = self._model.bos_id(), self._model.eos_id()
    self.eos = eos if eos >= 0 else None
    self.bos = _bos_or_eos(bos if bos >= 0 else None, self.eos)

  def encode(self, text: str) -> np.ndarray:
    return np.asarray(self._model.encode(text), np.int32)

  def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [np.asarray(ids, np.int32) for ids in self._model.encode(list(texts), num_threads=-1)]

  def decode(self, ids) -> str:
    return self._model.decode(_checked(ids, self).tolist())

  def files(self):
    return {} if self.name in TOKENIZERS else {self.name: self._content}


class HuggingFaceTokenizer:
  """Hugging Face tokenizer, from the contents of tokenizer.json and tokenizer_config.json.

  The second, `special`, is optional and read only for the BOS and EOS tokens; without it, tokens
  with common names are used.
  """

  name = "tokenizer" + _HUGGING_FACE

  def __init__(self, content: bytes, special: bytes | None = None):
    _need("tokenizers")
    import tokenizers

    try:
      self._model = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as e:  # the package raises plain Exception
      raise ValueError(f"the content is not a tokenizer.json ({e})") from e
    # A file may enable truncation, padding, and parsing of special tokens in the text.
    self._model.no_truncation()
    self._model.no_padding()
    self._model.encode_special_tokens = True
    self._content = content
    self.hash = hashlib.sha256(content).hexdigest()
    self.vocab = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
    named = json.loads(special) if special else {}
    self.eos = self._special(named.get("eos_token"), _EOS)
    self.bos = _bos_or_eos(self._special(named.get("bos_token"), _BOS), self.eos)

  def _special(self, token, usual: Sequence[str]) -> int | None:
    """Return the id of the token in tokenizer_config.json, else of the first usual name."""
    names = usual if token is None else [token["content"] if isinstance(token, dict) else token]
    return next((id for x in names if (id := self._model.token_to_id(x)) is not None), None)

  def encode(self, text: str) -> np.ndarray:
    return np.asarray(self._model.encode(text, add_special_tokens=False).ids, np.int32)

  def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
    many = self._model.encode_batch(list(texts), add_special_tokens=False)
    return [np.asarray(one.ids, np.int32) for one in many]

  def decode(self, ids) -> str:
    return self._model.decode(_checked(ids, self).tolist(), skip_special_tokens=True)

  def files(self):
    tokens = {"bos_token": self.bos, "eos_token": self.eos}
    special = {x: self._model.id_to_token(id) for x, id in tokens.items() if id is not None}
    return {self.name: self._content, _SPECIAL: json.dumps(special).encode()}


def _bos_or_eos(bos: int | None, eos: int | None) -> int:
  """Return BOS, or EOS for tokenizers that separate documents by a single token."""
  if bos is None and eos is None:
    raise ValueError(f"it has neither a BOS nor an EOS token: set bos_token in {_SPECIAL}")
  return eos if bos is None else bos


def _need(package: str):
  if importlib.util.find_spec(package) is None:
    raise ImportError(
      f"This tokenizer needs the package {package}: "
      'install it with `pip install "deltanet-jax[data]"`.'
    )


def _mistral() -> SentencePieceTokenizer:
  """Tokenizer of Mistral 7B: SentencePiece BPE with byte fallback, 32,000 pieces."""
  # Only the file is needed: importing mistral_common would take seconds.
  _need("mistral_common")
  package = importlib.util.find_spec("mistral_common")
  path = pathlib.Path(package.origin).parent / "data" / "tokenizer.model.v1"
  if not path.is_file():
    raise ImportError(
      f"The installed mistral-common has no {path.name}: install the version in constraints.txt."
    )
  return SentencePieceTokenizer(path.read_bytes(), "mistral")


def find_tokenizers(folder: str | pathlib.Path) -> list[pathlib.Path]:
  """Return the paths of all tokenizer files in a folder, preferred ones first."""
  paths = [files.as_path(folder) / f"tokenizer{x}" for x in (_HUGGING_FACE, _SENTENCE_PIECE)]
  return [path for path in paths if path.is_file()]


def find_tokenizer(folder: str | pathlib.Path) -> pathlib.Path | None:
  """Return the path of the tokenizer file in a folder, or None."""
  return next(iter(find_tokenizers(folder)), None)


def load_tokenizer(name: str | pathlib.Path, folder: str | pathlib.Path = "") -> Tokenizer:
  """Load a tokenizer by name (`bytes`, `mistral`) or from a tokenizer.json or SentencePiece file.

  Args:
    name: Name, path of a file, or path of a folder with tokenizer.json or tokenizer.model.
    folder: Base folder of a relative path: the run or corpus whose config has this name.

  Raises:
    FileNotFoundError: There is no such file, or the folder has no tokenizer.
    ValueError: The name is unknown, or the file is not a supported tokenizer.
  """
  match str(name):
    case "bytes":
      return BytesTokenizer()
    case "mistral":
      return _mistral()
  path = files.as_path(folder) / files.as_path(name)
  expected = (
    f"expected one of {TOKENIZERS}, or the path of a tokenizer.json (Hugging Face) or of a"
    f" {_SENTENCE_PIECE} file (SentencePiece)"
  )
  if path.is_dir():
    found = find_tokenizer(path)
    if found is None:
      raise FileNotFoundError(f"tokenizer: {path} has no tokenizer.json or tokenizer.model.")
    path = found
  is_name = pathlib.Path(name).name == str(name) and not path.suffix
  if not path.exists() and not is_name:
    raise FileNotFoundError(f"tokenizer: no such file {str(path)!r}; {expected}.")
  if path.suffix not in (_HUGGING_FACE, _SENTENCE_PIECE):
    raise ValueError(f"tokenizer is {str(path)!r}, {expected}.")
  try:
    if path.suffix == _SENTENCE_PIECE:
      return SentencePieceTokenizer(path.read_bytes())
    special = path.with_name(_SPECIAL)
    return HuggingFaceTokenizer(
      path.read_bytes(), special.read_bytes() if special.is_file() else None
    )
  except ValueError as e:
    raise ValueError(f"{path} cannot be read as a tokenizer: {e}.") from e


def keep_tokenizer(tokenizer: Tokenizer, folder: str | pathlib.Path):
  """Save the tokenizer's files, if any; `load_tokenizer(tokenizer.name, folder)` loads it."""
  for name, content in tokenizer.files().items():
    with files.replacing(files.as_path(folder) / name) as new:
      new.write_bytes(content)


def vocabulary_mismatch(tokenizer: int, model: int) -> str | None:
  """Describe a mismatch of the vocabulary sizes of tokenizer and model; None if they match.

  The model's vocabulary may be rounded up to a multiple of 512.
  """
  if tokenizer > model:
    return f"the tokenizer has {tokenizer} ids, more than the {model} of the model"
  if model > -(-tokenizer // 512) * 512:
    return f"the tokenizer has {tokenizer} ids, far fewer than the {model} of the model"
  return None
