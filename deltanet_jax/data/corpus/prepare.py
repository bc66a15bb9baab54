"""Text files to a prepared corpus: documents shuffled on disk, tokenized, written in shards.

Interrupted, it goes on where it was: `.partial` in the output keeps the buckets and the
list of finished shards, and the manifest is written last.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator

import numpy as np
from tqdm import tqdm

from deltanet_jax import files
from deltanet_jax.data.corpus import manifest as manifests
from deltanet_jax.data.corpus.buckets import Dealt, deal, is_whole, shuffled
from deltanet_jax.data.corpus.manifest import Manifest, Recipe, Shard, SplitInfo
from deltanet_jax.data.corpus.shards import check_files
from deltanet_jax.data.corpus.text import find_sources
from deltanet_jax.data.corpus.tokenizer import Tokenizer

_PARTIAL = ".partial"
_GROUP = 1 << 22  # bytes of text tokenized at a time


def _check_settings(tokenizer: Tokenizer, validation: float, shard_tokens: int):
  if tokenizer.vocab > manifests.MAX_VOCAB:
    raise ValueError(
      f"The tokenizer {tokenizer.name!r} has {tokenizer.vocab} ids, but shards are 16-bit: "
      f"use one of at most {manifests.MAX_VOCAB}."
    )
  if not 0 <= validation < 1:
    raise ValueError(f"validation is {validation}, expected a share from 0 to below 1.")
  if shard_tokens < 1:
    raise ValueError(f"shard_tokens is {shard_tokens}, expected a positive number.")


def _check_same(folder: pathlib.Path, old: Recipe, new: Recipe):
  names = [field.name for field in dataclasses.fields(Recipe)]
  if different := [name for name in names if getattr(old, name) != getattr(new, name)]:
    raise ValueError(
      f"{folder} was prepared, or begun, with other settings ({', '.join(different)}): "
      "use the same ones, another output, or delete the folder."
    )


def _check_output(output: pathlib.Path):
  """Refuses a folder with files of something else."""
  if output.exists() and not output.is_dir():
    raise ValueError(f"{output} is a file: give a folder as output.")
  if output.is_dir() and not (output / _PARTIAL / "dealt.json").is_file():
    foreign = sorted(p.name for p in output.iterdir() if p.name != _PARTIAL)
    if foreign:
      raise ValueError(
        f"{output} holds files of something else, like {foreign[0]}: give a new or empty folder."
      )


@contextlib.contextmanager
def _locked(partial: pathlib.Path):
  partial.mkdir(parents=True, exist_ok=True)
  with open(partial / "lock", "w") as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(
        f"Another process is preparing {partial.parent}: wait until it ends."
      ) from None
    yield


def _held_out(recipe: Recipe, documents: int) -> int:
  return max(round(documents * recipe.validation), 1) if recipe.validation else 0


def _deal_once(path: pathlib.Path, recipe: Recipe, partial: pathlib.Path) -> Dealt:
  """What the buckets hold, filling them unless that was finished before."""
  done = partial / "dealt.json"
  if done.is_file():
    stored = json.loads(done.read_text())
    _check_same(partial.parent, manifests.recipe_from(stored["recipe"]), recipe)
    dealt = Dealt(**stored["dealt"])
    if not is_whole(partial, dealt):
      raise ValueError(f"{partial} has lost data: delete {partial.parent} and prepare it again.")
    return dealt
  dealt = deal(find_sources(path), recipe.text_field, recipe.seed, partial)
  if not dealt.documents:
    raise ValueError(f"{path} has no document with text ({dealt.dropped} without).")
  if dealt.documents <= _held_out(recipe, dealt.documents):
    raise ValueError(
      f"{path} has {dealt.documents} documents with text, too few to hold out a share of "
      f"{recipe.validation}: give more, or set validation to 0."
    )
  files.write_json(done, {"recipe": dataclasses.asdict(recipe), "dealt": dataclasses.asdict(dealt)})
  return dealt


def _tokenized(
  texts: Iterator[bytes], tokenizer: Tokenizer, progress: Callable[[int], None]
) -> Iterator[tuple[np.ndarray, int]]:
  """Tokens of each document, bos first, and the bytes of its text."""
  group, size = [], 0
  for text in itertools.chain(texts, [None]):
    if text is not None:
      group.append(text)
      size += len(text)
    # A few megabytes at a time, which the tokenizer may spread over cores.
    if text is None or size >= _GROUP:
      encoded = tokenizer.encode_many([one.decode() for one in group])
      progress(size)
      for one, ids in zip(group, encoded):
        yield np.concatenate(([tokenizer.bos], ids)).astype(manifests.TOKEN), len(one)
      group, size = [], 0


def _write_shard(
  name: str, documents: Iterator[tuple[np.ndarray, int]], limit: int, partial: pathlib.Path
) -> Shard:
  """Writes documents until there are `limit` tokens or no more documents."""
  hashed, starts, tokens, text_bytes = hashlib.sha256(), [], 0, 0
  with open(partial / f"{name}.bin", "wb") as file:
    while tokens < limit and (document := next(documents, None)):
      ids, size = document
      starts.append(tokens)
      tokens += len(ids)
      text_bytes += size
      hashed.update(ids)
      file.write(ids)
  index = np.asarray(starts, manifests.START).tobytes()
  (partial / f"{name}.idx").write_bytes(index)
  for file in (f"{name}.bin", f"{name}.idx"):
    files.sync(partial / file)
    (partial / file).replace(partial.parent / file)
  return Shard(
    name=name,
    tokens=tokens,
    documents=len(starts),
    bytes=text_bytes,
    bin_sha256=hashed.hexdigest(),
    idx_sha256=hashlib.sha256(index).hexdigest(),
  )


def _write_shards(
  recipe: Recipe, tokenizer: Tokenizer, dealt: Dealt, partial: pathlib.Path
) -> dict[str, SplitInfo]:
  """Both splits, the first documents being held out; goes on after the shards already there."""
  journal = partial / "shards.json"
  shards = {"validation": [], "train": []}
  if journal.is_file():
    stored = json.loads(journal.read_text())
    shards = {split: [Shard(**shard) for shard in stored[split]] for split in shards}
  held_out = _held_out(recipe, dealt.documents)
  left = {"validation": held_out, "train": dealt.documents - held_out}
  earlier = SplitInfo.of([shard for split in shards for shard in shards[split]])
  texts = itertools.islice(shuffled(partial, dealt.buckets), earlier.documents, None)
  bar = tqdm(
    total=dealt.bytes,
    initial=earlier.bytes,
    desc="writing tokens",
    unit="B",
    unit_scale=True,
    unit_divisor=1024,
  )
  with bar:
    documents = _tokenized(texts, tokenizer, bar.update)
    for split, own in shards.items():
      left[split] -= SplitInfo.of(own).documents
      while left[split]:
        some = itertools.islice(documents, left[split])
        own.append(_write_shard(f"{split}-{len(own):05}", some, recipe.shard_tokens, partial))
        left[split] -= own[-1].documents
        files.write_json(journal, {s: list(map(dataclasses.asdict, shards[s])) for s in shards})
  return {split: SplitInfo.of(own) for split, own in shards.items()}


def prepare(
  source: str | pathlib.Path,
  output: str | pathlib.Path,
  tokenizer: Tokenizer,
  *,
  validation: float = 0.01,
  seed: int = 0,
  shard_tokens: int = 1 << 28,
  text_field: str = "text",
) -> Manifest:
  """Writes the corpus of a file or folder; again with the same settings, checks what is there.

  Args:
    validation: share of the documents that is held out, at least one unless it is 0.
    shard_tokens: a shard ends with the document that reaches so many.
    text_field: of JSON lines.
  """
  _check_settings(tokenizer, validation, shard_tokens)
  output = pathlib.Path(output)
  partial = output / _PARTIAL
  recipe = Recipe(
    tokenizer=tokenizer.name,
    tokenizer_hash=tokenizer.hash,
    vocab=tokenizer.vocab,
    bos=tokenizer.bos,
    validation=validation,
    seed=seed,
    shard_tokens=shard_tokens,
    text_field=text_field,
    sources=[(source.name, source.size) for source in find_sources(source)],
  )
  if (output / manifests.FILE).is_file():
    manifest = manifests.read_manifest(output)
    _check_same(output, manifest.recipe, recipe)
    check_files(output, manifest, checksums=True)
  else:
    _check_output(output)
    with _locked(partial):
      dealt = _deal_once(pathlib.Path(source), recipe, partial)
      splits = _write_shards(recipe, tokenizer, dealt, partial)
      manifest = Manifest(recipe=recipe, dropped=dealt.dropped, **splits)
      # Shards written before an interruption may have been touched since.
      check_files(output, manifest, checksums=True)
      files.write_json(output / manifests.FILE, dataclasses.asdict(manifest))
  shutil.rmtree(partial, ignore_errors=True)
  return manifest
