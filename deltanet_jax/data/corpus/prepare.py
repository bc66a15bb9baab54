"""Prepare a corpus from text files: shuffle documents on disk, tokenize them, write shards.

An interrupted preparation resumes: `.partial` in the output folder stores the shuffle buckets and
the list of completed shards, and the manifest is written last.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from deltanet_jax import files, object_storage
from deltanet_jax.data.corpus import manifest as manifests
from deltanet_jax.data.corpus.manifest import Manifest, Recipe, Shard, SplitInfo
from deltanet_jax.data.corpus.shards import check_files, open_corpus
from deltanet_jax.data.corpus.shuffle import BucketInfo, is_complete, write_buckets
from deltanet_jax.data.corpus.split import (
  Document,
  SplitDocuments,
  all_documents,
  split_validation,
)
from deltanet_jax.data.corpus.text import Paths, Source, find_sources
from deltanet_jax.data.corpus.tokenizer import Tokenizer, keep_tokenizer
from deltanet_jax.object_storage import ObjectPath

_PARTIAL = ".partial"
_BUCKETS = "dealt.json"  # written when the buckets are complete
_GROUP = 1 << 22  # bytes of text tokenized at a time


class _Input(NamedTuple):
  """Input of one split: the path that the user gave, and the text files found there."""

  path: str | pathlib.Path
  sources: list[Source]


def _check_settings(tokenizer: Tokenizer, validation: float, eos: bool, shard_tokens: int):
  if not 0 <= validation < 1:
    raise ValueError(f"validation is {validation}, expected a fraction from 0 to below 1.")
  if eos and tokenizer.eos is None:
    raise ValueError(f"The tokenizer {tokenizer.name!r} has no EOS token: set eos=False.")
  if shard_tokens < 1:
    raise ValueError(f"shard_tokens is {shard_tokens}, expected at least 1.")


def _check_same(folder: pathlib.Path, old: Recipe, new: Recipe):
  if different := new.different(old):
    raise ValueError(
      f"{folder} was prepared with other settings ({', '.join(different)}): use the same settings,"
      " choose another output, or delete the folder."
    )


def _check_output(output: pathlib.Path):
  """Raise ValueError if the output is a file, or a folder with unrelated files."""
  if output.exists() and not output.is_dir():
    raise ValueError(f"{output} is a file, expected a folder for the output.")
  if output.is_dir() and not (output / _PARTIAL / _BUCKETS).is_file():
    foreign = sorted(p.name for p in output.iterdir() if p.name != _PARTIAL)
    if foreign:
      raise ValueError(
        f"{output} has unrelated files such as {foreign[0]}, expected a new or empty folder."
      )


def _find(path: Paths, report: Callable[[str], None]) -> _Input:
  """Find the text files of a file or folder, and report skipped files."""
  sources, skipped = find_sources(path)
  if skipped:
    more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    report(
      f"{path}: reading {len(sources)} files, skipping {len(skipped)}:"
      f" {', '.join(skipped[:5])}{more} (supported: .txt, .md, .json, .jsonl,"
      " .parquet, .arrow and text without suffix)"
    )
  single = isinstance(path, str | pathlib.Path)
  return _Input(path if single else ", ".join(map(str, path)), sources)


def _checksums(sources: list[Source]) -> list[tuple[str, str]]:
  """Return name and SHA-256 of each file."""
  bar = tqdm(sources, desc="checksums", unit="file", disable=not sources)
  return [(source.name, files.sha256(source.path)) for source in bar]


def _shuffle(
  inputs: dict[str, _Input], recipe: Recipe, partial: pathlib.Path
) -> dict[str, BucketInfo]:
  """Write the buckets of each input, unless they are already complete."""
  done = partial / _BUCKETS
  if done.is_file():
    stored = json.loads(done.read_text())
    if stored["recipe"]["version"] != recipe.version:
      raise ValueError(
        f"{partial.parent} was started by another version of deltanet-jax: delete it and prepare it"
        " again."
      )
    _check_same(partial.parent, manifests.recipe_from(stored["recipe"]), recipe)
    buckets = {name: BucketInfo(**values) for name, values in stored["dealt"].items()}
    if not all(is_complete(partial / name, info) for name, info in buckets.items()):
      raise ValueError(f"{partial} is incomplete: delete {partial.parent} and prepare it again.")
    return buckets
  buckets = {}
  for name, (path, sources) in inputs.items():
    (partial / name).mkdir(exist_ok=True)
    info = write_buckets(sources, recipe.text_field, recipe.seed, partial / name)
    if not info.documents:
      raise ValueError(f"{path} has no text (empty documents: {info.dropped}).")
    buckets[name] = info
  # Raises if the validation fraction cannot be split off, before the buckets count as complete.
  _split(buckets, recipe, partial)
  stored = {name: dataclasses.asdict(info) for name, info in buckets.items()}
  files.write_json(done, {"recipe": dataclasses.asdict(recipe), "dealt": stored})
  return buckets


def _split(
  buckets: dict[str, BucketInfo], recipe: Recipe, partial: pathlib.Path
) -> dict[str, SplitDocuments]:
  """Return the documents of each split."""
  if "validation" in buckets:
    return {name: all_documents(partial / name, buckets[name]) for name in ("validation", "train")}
  return split_validation(partial / "train", buckets["train"], recipe.validation)


def _tokenize(
  documents: Iterator[Document],
  tokenizer: Tokenizer,
  eos: int | None,
  progress: Callable[[int], None],
) -> Iterator[tuple[np.ndarray, int]]:
  """Yield the tokens of each document, with BOS and EOS, and the size of its text in bytes."""
  dtype = manifests.token_dtype(tokenizer.vocab)
  group, size = [], 0
  for document in itertools.chain(documents, [None]):
    if document is not None:
      group.append(document)
      size += len(document.text)
    # In groups of a few megabytes: the tokenizer may use all cores.
    if document is None or size >= _GROUP:
      encoded = tokenizer.encode_many([one.text.decode() for one in group])
      progress(size)
      for one, ids in zip(group, encoded):
        end = [] if eos is None or not one.ends else [eos]
        yield np.concatenate(([tokenizer.bos], ids, end)).astype(dtype), len(one.text)
      group, size = [], 0


def _write_shard(
  name: str, documents: Iterator[tuple[np.ndarray, int]], limit: int, partial: pathlib.Path
) -> Shard:
  """Write one shard: documents until it has `limit` tokens or there are no more."""
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
  recipe: Recipe, tokenizer: Tokenizer, splits: dict[str, SplitDocuments], partial: pathlib.Path
) -> dict[str, SplitInfo]:
  """Write the shards of both splits, resuming after those already complete."""
  journal = partial / "shards.json"
  shards = {split: [] for split in splits}
  if journal.is_file():
    stored = json.loads(journal.read_text())
    shards = {split: [Shard(**shard) for shard in stored[split]] for split in shards}
  buckets = {split.folder: split.buckets for split in splits.values()}
  bar = tqdm(
    total=sum(info.bytes for info in buckets.values()),
    initial=SplitInfo.of([shard for split in shards for shard in shards[split]]).bytes,
    desc="writing tokens",
    unit="B",
    unit_scale=True,
    unit_divisor=1024,
  )
  with bar:
    for split, own in shards.items():
      done = SplitInfo.of(own).documents
      left = splits[split].count - done
      documents = _tokenize(splits[split].documents(done), tokenizer, recipe.eos, bar.update)
      while left:
        own.append(_write_shard(f"{split}-{len(own):05}", documents, recipe.shard_tokens, partial))
        left -= own[-1].documents
        files.write_json(journal, {s: list(map(dataclasses.asdict, shards[s])) for s in shards})
  return {split: SplitInfo.of(own) for split, own in shards.items()}


def prepare(
  source: Paths,
  output: str | pathlib.Path,
  tokenizer: Tokenizer,
  *,
  validation: float | Paths = 0.01,
  eos: bool = True,
  seed: int = 0,
  shard_tokens: int = 1 << 28,
  text_field: str = "text",
  report: Callable[[str], None] = print,
) -> Manifest:
  """Prepare a tokenized corpus from a text file or a folder of them.

  Rerunning with the same settings resumes an interrupted preparation, or verifies the checksums of
  a complete corpus.

  Args:
    source: Text, Markdown, JSON or JSON lines file, possibly compressed, Parquet or Arrow file, a
      folder of them, a folder of Hugging Face `datasets`, a glob pattern, or several of these.
    output: New or empty folder. On object storage, the corpus is prepared in the cache folder
      and uploaded, the manifest last.
    tokenizer: Encodes the documents; its files are saved with the corpus.
    validation: Validation split: a fraction of the text's bytes, or separate input like `source`.
    eos: Whether to append the tokenizer's EOS token to each document.
    seed: Of the shuffle.
    shard_tokens: Shard size: a shard ends with the document that reaches this number of tokens.
    text_field: Field of the JSON objects, or column of Parquet and Arrow files, with the text.
    report: Called with a one-line message about skipped files.
  """
  separate = not isinstance(validation, int | float)
  fraction = 0.0 if separate else float(validation)
  _check_settings(tokenizer, fraction, eos, shard_tokens)
  output = files.as_path(output)
  inputs = dict(train=_find(source, report))
  if separate:
    inputs["validation"] = _find(validation, report)
  recipe = Recipe(
    tokenizer=tokenizer.name,
    tokenizer_hash=tokenizer.hash,
    vocab=tokenizer.vocab,
    bos=tokenizer.bos,
    eos=tokenizer.eos if eos else None,
    validation=fraction,
    seed=seed,
    shard_tokens=shard_tokens,
    text_field=text_field,
    sources=_checksums(inputs["train"].sources),
    validation_sources=_checksums(inputs["validation"].sources if separate else []),
  )
  try:
    run = _prepare_remote if isinstance(output, ObjectPath) else _prepare
    return run(inputs, recipe, output, tokenizer)
  except OSError as e:
    if e.errno is None:
      raise
    raise OSError(
      f"{e.filename or output} cannot be read or written ({e.strerror}): fix this and rerun the"
      " same command to resume."
    ) from e


def _prepare_remote(inputs, recipe: Recipe, output: ObjectPath, tokenizer) -> Manifest:
  """Prepare a corpus in the cache folder, and upload it."""
  if (output / manifests.FILE).is_file():
    manifest = open_corpus(output, verify=True).manifest
    _check_same(output, manifest.recipe, recipe)
    return manifest
  uploading = output / _PARTIAL / "uploading"
  if not uploading.is_file() and (foreign := next(output.iterdir(), None)):
    raise ValueError(
      f"{output} has unrelated files such as {foreign.name}, expected a new or empty folder."
    )
  staged = files.cache_folder() / "prepare" / hashlib.sha256(str(output).encode()).hexdigest()[:16]
  manifest = _prepare(inputs, recipe, staged, tokenizer)
  uploading.write_text("interrupted uploads have this file\n")
  object_storage.upload(staged, output, last=manifests.FILE)
  uploading.unlink()
  shutil.rmtree(staged, ignore_errors=True)
  return manifest


def _prepare(inputs, recipe: Recipe, output: pathlib.Path, tokenizer: Tokenizer) -> Manifest:
  partial = output / _PARTIAL
  if (output / manifests.FILE).is_file():
    manifest = manifests.read_manifest(output)
    _check_same(output, manifest.recipe, recipe)
    check_files(output, manifest, checksums=True)
  else:
    _check_output(output)
    partial.mkdir(parents=True, exist_ok=True)
    with files.locked(partial / "lock", name=output):
      buckets = _shuffle(inputs, recipe, partial)
      splits = _write_shards(recipe, tokenizer, _split(buckets, recipe, partial), partial)
      dropped = sum(info.dropped for info in buckets.values())
      manifest = Manifest(recipe=recipe, dropped=dropped, **splits)
      keep_tokenizer(tokenizer, output)
      # Shards written before an interruption may have been modified since.
      check_files(output, manifest, checksums=True)
      files.write_json(output / manifests.FILE, dataclasses.asdict(manifest))
  shutil.rmtree(partial, ignore_errors=True)
  return manifest
