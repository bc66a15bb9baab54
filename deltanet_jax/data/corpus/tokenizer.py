"""Text to token ids and back: raw bytes, the Mistral tokenizer of the paper, or any file of one."""

import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from deltanet_jax import files

TOKENIZERS = ("bytes", "mistral")
# Files that are read, by how their names end.
_HUGGING_FACE, _SENTENCE_PIECE = ".json", ".model"
# What says which tokens begin and end a text, beside a tokenizer.json.
_SPECIAL = "tokenizer_config.json"
# Names for it where that file is missing, the usual first.
_BOS = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "[BOS]", "[CLS]")
_EOS = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|eos|>", "[EOS]", "[SEP]")


@runtime_checkable
class Tokenizer(Protocol):
  """Ids of a text and back; `keep` and `load_tokenizer` take one from folder to folder."""

  name: str  # one of TOKENIZERS, or the file's name where it is kept
  vocab: int
  bos: int
  eos: int | None
  hash: str  # sha256 of what defines the ids

  def encode(self, text: str) -> np.ndarray:
    """Ids of a text as int32, without bos and eos."""

  def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids of each text; may use all cores."""

  def decode(self, ids) -> str:
    """The text of ids; bos and eos are left out, and an id outside the vocabulary is an error."""

  def files(self) -> dict[str, bytes]:
    """Files that `load_tokenizer` needs to make it again, by name; none if the name is enough."""


def _checked(ids, tokenizer: Tokenizer) -> np.ndarray:
  ids = np.asarray(ids)
  wrong = ids[(ids < 0) | (ids >= tokenizer.vocab)]
  if wrong.size:
    raise ValueError(
      f"token id {wrong[0]} is outside the {tokenizer.vocab} of the tokenizer {tokenizer.name!r}:"
      " decode with the tokenizer that the model was trained with."
    )
  return ids


class BytesTokenizer:
  """Ids 0 to 255 are the bytes of UTF-8, 256 is bos, 257 eos."""

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
    # A model may stop inside a character: what is no UTF-8 shows as a replacement mark.
    return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

  def files(self):
    return {}


class SentencePieceTokenizer:
  """A SentencePiece model, from the content of its file."""

  def __init__(self, content: bytes, name: str = "tokenizer" + _SENTENCE_PIECE):
    _need("sentencepiece")
    import sentencepiece

    try:
      self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as e:
      raise ValueError("the content is no SentencePiece model") from e
    self.name, self._content = name, content
    self.hash = hashlib.sha256(content).hexdigest()
    self.vocab = self._model.vocab_size()
    # Ids are -1 where a model has no such piece.
    bos, eos = self._model.bos_id(), self._model.eos_id()
    self.eos = eos if eos >= 0 else None
    self.bos = _begin(bos if bos >= 0 else None, self.eos)

  def encode(self, text: str) -> np.ndarray:
    return np.asarray(self._model.encode(text), np.int32)

  def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [np.asarray(ids, np.int32) for ids in self._model.encode(list(texts), num_threads=-1)]

  def decode(self, ids) -> str:
    return self._model.decode(_checked(ids, self).tolist())

  def files(self):
    return {} if self.name in TOKENIZERS else {self.name: self._content}


class HuggingFaceTokenizer:
  """A `tokenizer.json`, from its content; `special` is that of the tokenizer_config.json with it.

  Only the tokens that begin and end a text are read of the second; without it they are those of
  the usual names.
  """

  name = "tokenizer" + _HUGGING_FACE

  def __init__(self, content: bytes, special: bytes | None = None):
    _need("tokenizers")
    import tokenizers

    try:
      self._model = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as e:  # the package raises plain Exception
      raise ValueError(f"the content is no tokenizer.json ({e})") from e
    # A file may ask for rows of one length, and for special tokens where a text shows their names.
    self._model.no_truncation()
    self._model.no_padding()
    self._model.encode_special_tokens = True
    self._content = content
    self.hash = hashlib.sha256(content).hexdigest()
    self.vocab = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
    named = json.loads(special) if special else {}
    self.eos = self._special(named.get("eos_token"), _EOS)
    self.bos = _begin(self._special(named.get("bos_token"), _BOS), self.eos)

  def _special(self, token, usual: Sequence[str]) -> int | None:
    """The id of a token as tokenizer_config.json has it, else the first of the usual names."""
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


def _begin(bos: int | None, eos: int | None) -> int:
  """bos, for which eos stands in models that separate texts by one token."""
  if bos is None and eos is None:
    raise ValueError(f"no token begins or ends a text: name one as bos_token in a {_SPECIAL}")
  return eos if bos is None else bos


def _need(package: str):
  if importlib.util.find_spec(package) is None:
    raise ImportError(
      f"This tokenizer needs the package {package}: "
      'install it with `pip install "deltanet-jax[data]"`.'
    )


def _mistral() -> SentencePieceTokenizer:
  """SentencePiece BPE with byte fallback, 32,000 pieces, as Mistral 7B has it."""
  # mistral_common is only where the file lies: importing it would take seconds.
  _need("mistral_common")
  package = importlib.util.find_spec("mistral_common")
  path = pathlib.Path(package.origin).parent / "data" / "tokenizer.model.v1"
  if not path.is_file():
    raise ImportError(
      f"The installed mistral-common has no {path.name}: install the version in constraints.txt."
    )
  return SentencePieceTokenizer(path.read_bytes(), "mistral")


def find_tokenizer(folder: str | pathlib.Path) -> pathlib.Path | None:
  """The file of a tokenizer in a folder, if there is one."""
  names = [f"tokenizer{suffix}" for suffix in (_HUGGING_FACE, _SENTENCE_PIECE)]
  return next((path for x in names if (path := pathlib.Path(folder) / x).is_file()), None)


def load_tokenizer(name: str | pathlib.Path, folder: str | pathlib.Path = "") -> Tokenizer:
  """The tokenizer called `bytes` or `mistral`, or that of a file: tokenizer.json or SentencePiece.

  Args:
    name: or the path of a file, or of a folder with tokenizer.json or tokenizer.model.
    folder: where a path begins; that of a run or a corpus for the name that it keeps.
  """
  match str(name):
    case "bytes":
      return BytesTokenizer()
    case "mistral":
      return _mistral()
  path = pathlib.Path(folder) / name
  path = (find_tokenizer(path) or path) if path.is_dir() else path
  if not path.is_file() or path.suffix not in (_HUGGING_FACE, _SENTENCE_PIECE):
    raise ValueError(
      f"tokenizer is {str(path)!r}, expected one of {TOKENIZERS} or the path of a tokenizer.json"
      f" (Hugging Face) or of a file that ends in {_SENTENCE_PIECE} (SentencePiece)."
    )
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
  """Writes the tokenizer's files, if it has any; then `load_tokenizer(its name, folder)` is it."""
  for name, content in tokenizer.files().items():
    with files.replacing(pathlib.Path(folder) / name) as new:
      new.write_bytes(content)


def vocabulary_mismatch(tokenizer: int, model: int) -> str | None:
  """What is odd about a tokenizer and a model of so many ids, in words; None if they suit.

  A model may have some more than the tokenizer, up to a multiple of 512: vocabularies are rounded.
  """
  if tokenizer > model:
    return f"the tokenizer has {tokenizer} ids, more than the {model} of the model"
  if model > -(-tokenizer // 512) * 512:
    return f"the tokenizer has {tokenizer} ids, far fewer than the {model} of the model"
  return None
