"""A prepared corpus: two streams of tokens over memory-mapped files."""

import dataclasses
import functools
import hashlib
import pathlib

import numpy as np

from deltanet_jax.data.corpus import manifest as manifests
from deltanet_jax.data.corpus.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer
from deltanet_jax.files import sha256

# Up to so many bytes the checksums are compared at every opening (about a second per 500 MB).
_ALWAYS_VERIFIED = 1 << 28


# A map keeps its file open, and a large corpus has more shards than a process may open files.
# The checksum in the key tells a file from one that was there before it.
@functools.lru_cache(maxsize=256)
def _map(path: str, dtype: str, checksum: str) -> np.ndarray:
  # A plain view: slicing a memmap itself costs several microseconds.
  return np.asarray(np.memmap(path, dtype, mode="r"))


@dataclasses.dataclass(frozen=True)
class Split:
  """Documents as one stream of tokens; each begins with bos and, if asked for, ends with eos."""

  name: str
  folder: pathlib.Path
  info: manifests.SplitInfo
  dtype: str  # of the files

  @property
  def tokens(self) -> int:
    return self.info.tokens

  @property
  def documents(self) -> int:
    return self.info.documents

  @property
  def bytes(self) -> int:
    """Bytes of the text in UTF-8."""
    return self.info.bytes

  @functools.cached_property
  def _offsets(self) -> np.ndarray:
    return np.cumsum([0] + [shard.tokens for shard in self.info.shards])

  def _parts(self, start: int, stop: int):
    """The shards that hold the tokens [start, stop): tokens, starts, and the stream's offset."""
    first = int(np.searchsorted(self._offsets, start, side="right")) - 1
    last = int(np.searchsorted(self._offsets, stop))
    for shard, offset in zip(self.info.shards[first:last], self._offsets[first:last].tolist()):
      path = f"{self.folder}/{shard.name}"
      tokens = _map(path + ".bin", self.dtype, shard.bin_sha256)
      starts = _map(path + ".idx", manifests.START, shard.idx_sha256)
      yield tokens, starts, offset

  def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [start, stop) as int32, and for each the number of its document, from 1."""
    tokens = np.empty(stop - start, np.int32)
    begins = np.zeros(stop - start, np.int32)
    for shard_tokens, shard_starts, offset in self._parts(start, stop):
      low, high = max(start - offset, 0), min(stop - offset, len(shard_tokens))
      at = offset - start
      tokens[at + low : at + high] = shard_tokens[low:high]
      begins[at + shard_starts[slice(*np.searchsorted(shard_starts, (low, high)))]] = 1
    begins[0] = 1
    return tokens, np.cumsum(begins, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Corpus:
  manifest: manifests.Manifest
  train: Split
  validation: Split

  def identity(self) -> dict[str, str]:
    """Hashes of the tokenizer and of all tokens in their order, wherever the files lie."""
    shards = self.manifest.train.shards + self.manifest.validation.shards
    tokenizer = self.manifest.recipe.tokenizer_hash
    sums = [tokenizer, *(shard.bin_sha256 for shard in shards)]
    return dict(tokenizer=tokenizer, corpus=hashlib.sha256("\n".join(sums).encode()).hexdigest())

  def tokenizer(self) -> Tokenizer:
    """What made its tokens; a file of it is kept with them."""
    return load_tokenizer(self.manifest.recipe.tokenizer, self.train.folder)


def _check_shard(folder: pathlib.Path, shard: manifests.Shard, dtype: str, checksums: bool):
  for suffix, count, numbers, checksum in (
    (".bin", shard.tokens, dtype, shard.bin_sha256),
    (".idx", shard.documents, manifests.START, shard.idx_sha256),
  ):
    path = folder / (shard.name + suffix)
    size = path.stat().st_size if path.is_file() else None
    expected = count * np.dtype(numbers).itemsize
    if size != expected:
      found = "missing" if size is None else f"of {size} bytes"
      raise ValueError(
        f"{path} is {found}, expected {expected} bytes: delete {folder} and prepare it again."
      )
    if checksums and sha256(path) != checksum:
      raise ValueError(
        f"{path} has another checksum than in the manifest: delete {folder} and prepare it again."
      )


def check_files(folder: pathlib.Path, manifest: manifests.Manifest, *, checksums: bool):
  """Raises if a file of the corpus is missing, of another size or, if asked for, of other bytes."""
  dtype = manifests.token_dtype(manifest.recipe.vocab)
  for shard in manifest.train.shards + manifest.validation.shards:
    _check_shard(folder, shard, dtype, checksums)
  path = folder / manifest.recipe.tokenizer
  known = manifest.recipe.tokenizer in TOKENIZERS
  if not known and (not path.is_file() or sha256(path) != manifest.recipe.tokenizer_hash):
    raise ValueError(
      f"{path} is missing or was changed since: put it back, or delete {folder} and prepare it"
      " again."
    )


def open_corpus(
  folder: str | pathlib.Path, *, tokenizer: Tokenizer | None = None, verify: bool | None = None
) -> Corpus:
  """A prepared corpus, after checking that its files are those of its manifest.

  Args:
    tokenizer: if given, must be the one that made the tokens.
    verify: compare checksums; None does so for a corpus of at most 256 MB. Sizes always are.
  """
  folder = pathlib.Path(folder)
  manifest = manifests.read_manifest(folder)
  recipe = manifest.recipe
  if tokenizer is not None and tokenizer.hash != recipe.tokenizer_hash:
    raise ValueError(
      f"{folder} was made with the tokenizer {recipe.tokenizer!r} of hash "
      f"{recipe.tokenizer_hash[:12]}, not {tokenizer.name!r} of {tokenizer.hash[:12]}: "
      "use that one, or prepare the corpus again."
    )
  dtype = manifests.token_dtype(recipe.vocab)
  if verify is None:
    tokens = manifest.train.tokens + manifest.validation.tokens
    verify = tokens * np.dtype(dtype).itemsize <= _ALWAYS_VERIFIED
  check_files(folder, manifest, checksums=verify)
  return Corpus(
    manifest,
    Split("train", folder, manifest.train, dtype),
    Split("validation", folder, manifest.validation, dtype),
  )
