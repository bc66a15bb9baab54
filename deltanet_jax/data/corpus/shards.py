"""Open a prepared corpus: token streams of two splits over memory-mapped shards."""

import dataclasses
import functools
import hashlib
import pathlib

import numpy as np

from deltanet_jax import files
from deltanet_jax.data.corpus import manifest as manifests
from deltanet_jax.data.corpus.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer
from deltanet_jax.files import as_path, sha256
from deltanet_jax.object_storage import ObjectPath

# Up to this size in bytes, checksums are verified at every opening (about 1 s per 500 MB).
_ALWAYS_VERIFIED = 1 << 28


# A memory map holds its file open, and a corpus may have more shards than the limit of open files.
# The checksum in the key distinguishes a file from an earlier one of the same name.
@functools.lru_cache(maxsize=256)
def _map(path: str, dtype: str, checksum: str) -> np.ndarray:
  # A plain view: slicing a memmap itself costs several microseconds.
  return np.asarray(np.memmap(path, dtype, mode="r"))


@dataclasses.dataclass(frozen=True)
class Split:
  """Documents as one token stream; each starts with BOS and, if configured, ends with EOS."""

  name: str
  folder: pathlib.Path
  info: manifests.SplitInfo
  dtype: str  # of the tokens on disk

  @property
  def tokens(self) -> int:
    return self.info.tokens

  @property
  def documents(self) -> int:
    return self.info.documents

  @property
  def bytes(self) -> int:
    """Size of the text in UTF-8 bytes."""
    return self.info.bytes

  @functools.cached_property
  def _offsets(self) -> np.ndarray:
    return np.cumsum([0] + [shard.tokens for shard in self.info.shards])

  def _parts(self, start: int, stop: int):
    """Yield (tokens, document offsets, offset in the stream) of the shards of [start, stop)."""
    first = int(np.searchsorted(self._offsets, start, side="right")) - 1
    last = int(np.searchsorted(self._offsets, stop))
    for shard, offset in zip(self.info.shards[first:last], self._offsets[first:last].tolist()):
      path = f"{self.folder}/{shard.name}"
      tokens = _map(path + ".bin", self.dtype, shard.bin_sha256)
      starts = _map(path + ".idx", manifests.START, shard.idx_sha256)
      yield tokens, starts, offset

  def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [start, stop) as int32, and the number of each token's document, from 1."""
    tokens = np.empty(stop - start, np.int32)
    starts = np.zeros(stop - start, np.int32)
    for shard_tokens, shard_starts, offset in self._parts(start, stop):
      low, high = max(start - offset, 0), min(stop - offset, len(shard_tokens))
      at = offset - start
      tokens[at + low : at + high] = shard_tokens[low:high]
      starts[at + shard_starts[slice(*np.searchsorted(shard_starts, (low, high)))]] = 1
    starts[0] = 1
    return tokens, np.cumsum(starts, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A prepared corpus: manifest and splits."""

  manifest: manifests.Manifest
  train: Split
  validation: Split

  def identity(self) -> dict[str, str]:
    """Return hashes of the tokenizer and of all tokens in order; independent of the path."""
    shards = self.manifest.train.shards + self.manifest.validation.shards
    tokenizer = self.manifest.recipe.tokenizer_hash
    sums = [tokenizer, *(shard.bin_sha256 for shard in shards)]
    return dict(tokenizer=tokenizer, corpus=hashlib.sha256("\n".join(sums).encode()).hexdigest())

  def tokenizer(self) -> Tokenizer:
    """Load the tokenizer of this corpus, which is saved in its folder."""
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
      found = "is missing" if size is None else f"has {size} bytes"
      raise ValueError(
        f"{path} {found}, expected {expected} bytes: delete {folder} and prepare it again."
      )
    if checksums and sha256(path) != checksum:
      raise ValueError(
        f"{path} does not match its checksum in the manifest: delete {folder} and prepare it again."
      )


def check_files(folder: pathlib.Path, manifest: manifests.Manifest, *, checksums: bool):
  """Raise ValueError if a file is missing or has the wrong size or, optionally, checksum."""
  dtype = manifests.token_dtype(manifest.recipe.vocab)
  for shard in manifest.train.shards + manifest.validation.shards:
    _check_shard(folder, shard, dtype, checksums)
  path = folder / manifest.recipe.tokenizer
  known = manifest.recipe.tokenizer in TOKENIZERS
  if not known and (not path.is_file() or sha256(path) != manifest.recipe.tokenizer_hash):
    raise ValueError(
      f"{path} is missing or was modified: restore it, or delete {folder} and prepare it again."
    )


def _cached(folder: ObjectPath, manifest: manifests.Manifest) -> pathlib.Path:
  """Return the local copy of a corpus on object storage; copy it if needed."""
  content = hashlib.sha256(str(manifest).encode()).hexdigest()[:16]
  local = files.cache_folder() / "corpora" / content / folder.name
  local.mkdir(parents=True, exist_ok=True)
  with files.locked(local.parent / "lock", wait=True):
    if not (local / manifests.FILE).is_file():
      _download(folder, manifest, local)
  return local


def _download(folder: ObjectPath, manifest: manifests.Manifest, local: pathlib.Path):
  """Copy the files of a corpus one by one, the manifest last; an interrupted copy resumes."""

  def copy(path):
    with files.writing(local), files.replacing(local / path.name) as new:
      new.write_bytes(path.read_bytes())

  for path in folder.objects():
    wanted = path.parent == folder and path.name != manifests.FILE
    if wanted and not (local / path.name).is_file():
      copy(path)
  try:
    check_files(local, manifest, checksums=True)
  except ValueError as e:
    files.remove_tree(local)
    raise ValueError(
      f"{folder} has a file that does not match its manifest: delete it and prepare it again."
    ) from e
  copy(folder / manifests.FILE)


def open_corpus(
  folder: str | pathlib.Path, *, tokenizer: Tokenizer | None = None, verify: bool | None = None
) -> Corpus:
  """Open a prepared corpus and verify its files against the manifest.

  Args:
    folder: Output of `prepare`. A corpus on object storage is copied once to the user's cache
      folder, because batches are random reads of memory-mapped shards.
    tokenizer: If given, must be the tokenizer of the corpus.
    verify: Whether to verify checksums; None: if the corpus has at most 256 MB. File sizes are
      always verified.
  """
  folder = as_path(folder)
  manifest = manifests.read_manifest(folder)
  if isinstance(folder, ObjectPath):
    folder = _cached(folder, manifest)
  recipe = manifest.recipe
  if tokenizer is not None and tokenizer.hash != recipe.tokenizer_hash:
    raise ValueError(
      f"{folder} was prepared with the tokenizer {recipe.tokenizer!r} (hash"
      f" {recipe.tokenizer_hash[:12]}), not with {tokenizer.name!r} (hash {tokenizer.hash[:12]}):"
      " use the first, or prepare the corpus again."
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
