"""Text files to a prepared corpus: documents shuffled on disk, tokenized, written in shards.

Interrupted, it goes on where it was: `.partial` in the output keeps the buckets and the
list of finished shards, and the manifest is written last.
"""

import dataclasses
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
from deltanet_jax.data.corpus.manifest import Manifest, Recipe, Shard, SplitInfo
from deltanet_jax.data.corpus.shards import check_files
from deltanet_jax.data.corpus.shuffle import Dealt, deal, is_whole
from deltanet_jax.data.corpus.split import Document, Part, hold_out, whole
from deltanet_jax.data.corpus.text import Paths, Source, find_sources
from deltanet_jax.data.corpus.tokenizer import Tokenizer, keep_tokenizer

_PARTIAL = ".partial"
_GROUP = 1 << 22  # bytes of text tokenized at a time


def _check_settings(tokenizer: Tokenizer, validation: float, eos: bool, shard_tokens: int):
  if not 0 <= validation < 1:
    raise ValueError(f"validation is {validation}, expected a share from 0 to below 1.")
  if eos and tokenizer.eos is None:
    raise ValueError(f"The tokenizer {tokenizer.name!r} has no eos for documents: set eos=False.")
  if shard_tokens < 1:
    raise ValueError(f"shard_tokens is {shard_tokens}, expected a positive number.")


def _check_same(folder: pathlib.Path, old: Recipe, new: Recipe):
  if different := new.different(old):
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


def _find(path: Paths, report: Callable[[str], None]) -> list[Source]:
  """The input files of a folder; tells what else lies there."""
  sources, skipped = find_sources(path)
  if skipped:
    more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
    report(
      f"{path}: {len(sources)} files are read, {len(skipped)} are left out:"
      f" {', '.join(skipped[:5])}{more} (read are .txt, .md, .json, .jsonl,"
      " .parquet, .arrow and text without suffix)"
    )
  return sources


def _checksums(sources: list[Source]) -> list[tuple[str, str]]:
  """Name and sha256 of each file."""
  bar = tqdm(sources, desc="checksums", unit="file", disable=not sources)
  return [(source.name, files.sha256(source.path)) for source in bar]


def _deal_once(inputs: dict[str, list[Source]], recipe: Recipe, partial: pathlib.Path) -> dict:
  """What the buckets of each input hold, filling them unless that was finished before."""
  done = partial / "dealt.json"
  if done.is_file():
    stored = json.loads(done.read_text())
    if stored["recipe"]["version"] != recipe.version:
      raise ValueError(
        f"{partial.parent} was begun by another version: delete it and prepare it again."
      )
    _check_same(partial.parent, manifests.recipe_from(stored["recipe"]), recipe)
    dealt = {name: Dealt(**values) for name, values in stored["dealt"].items()}
    if not all(is_whole(partial / name, one) for name, one in dealt.items()):
      raise ValueError(f"{partial} has lost data: delete {partial.parent} and prepare it again.")
    return dealt
  dealt = {}
  for name, sources in inputs.items():
    (partial / name).mkdir(exist_ok=True)
    dealt[name] = one = deal(sources, recipe.text_field, recipe.seed, partial / name)
    if not one.documents:
      raise ValueError(f"the input for {name} has no document with text ({one.dropped} without).")
  # Finds out whether the share can be held out, before anything says that this is done.
  _parts(dealt, recipe, partial)
  stored = {name: dataclasses.asdict(one) for name, one in dealt.items()}
  files.write_json(done, {"recipe": dataclasses.asdict(recipe), "dealt": stored})
  return dealt


def _parts(dealt: dict[str, Dealt], recipe: Recipe, partial: pathlib.Path) -> dict[str, Part]:
  """The documents of each split."""
  if "validation" in dealt:
    return {name: whole(partial / name, dealt[name]) for name in ("validation", "train")}
  return hold_out(partial / "train", dealt["train"], recipe.validation)


def _tokenized(
  documents: Iterator[Document],
  tokenizer: Tokenizer,
  eos: int | None,
  progress: Callable[[int], None],
) -> Iterator[tuple[np.ndarray, int]]:
  """Tokens of each document, bos first and eos last, and the bytes of its text."""
  dtype = manifests.token_dtype(tokenizer.vocab)
  group, size = [], 0
  for document in itertools.chain(documents, [None]):
    if document is not None:
      group.append(document)
      size += len(document.text)
    # A few megabytes at a time, which the tokenizer may spread over cores.
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
  recipe: Recipe, tokenizer: Tokenizer, parts: dict[str, Part], partial: pathlib.Path
) -> dict[str, SplitInfo]:
  """Both splits, going on after the shards already there."""
  journal = partial / "shards.json"
  shards = {split: [] for split in parts}
  if journal.is_file():
    stored = json.loads(journal.read_text())
    shards = {split: [Shard(**shard) for shard in stored[split]] for split in shards}
  total = sum(
    dealt.bytes for dealt in {part.folder: part.dealt for part in parts.values()}.values()
  )
  bar = tqdm(
    total=total,
    initial=SplitInfo.of([shard for split in shards for shard in shards[split]]).bytes,
    desc="writing tokens",
    unit="B",
    unit_scale=True,
    unit_divisor=1024,
  )
  with bar:
    for split, own in shards.items():
      done = SplitInfo.of(own).documents
      left = parts[split].count - done
      documents = _tokenized(parts[split].documents(done), tokenizer, recipe.eos, bar.update)
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
  """Writes the corpus of a file or folder; again with the same settings, checks what is there.

  Args:
    source: a file, a folder, a glob pattern, a folder of Hugging Face `datasets`, or several.
    validation: share of the text's bytes that is held out, or a file or folder of its own.
    eos: whether documents end with a token that a model learns to stop at.
    shard_tokens: a shard ends with the document that reaches so many.
    text_field: field of JSON objects, or column of Parquet and Arrow files, with the text.
    report: called with one line of text, about files that are left out.
  """
  own = not isinstance(validation, int | float)
  share = 0.0 if own else float(validation)
  _check_settings(tokenizer, share, eos, shard_tokens)
  output = pathlib.Path(output)
  inputs = dict(train=_find(source, report)) | (
    dict(validation=_find(validation, report)) if own else {}
  )
  recipe = Recipe(
    tokenizer=tokenizer.name,
    tokenizer_hash=tokenizer.hash,
    vocab=tokenizer.vocab,
    bos=tokenizer.bos,
    eos=tokenizer.eos if eos else None,
    validation=share,
    seed=seed,
    shard_tokens=shard_tokens,
    text_field=text_field,
    sources=_checksums(inputs["train"]),
    validation_sources=_checksums(inputs.get("validation", [])),
  )
  try:
    return _prepare(inputs, recipe, output, tokenizer)
  except OSError as e:
    if e.errno is None:
      raise
    raise OSError(
      f"{e.filename or output} cannot be read or written ({e.strerror}): mend that and start the"
      " same command again, it goes on where it was."
    ) from e


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
      dealt = _deal_once(inputs, recipe, partial)
      splits = _write_shards(recipe, tokenizer, _parts(dealt, recipe, partial), partial)
      dropped = sum(one.dropped for one in dealt.values())
      manifest = Manifest(recipe=recipe, dropped=dropped, **splits)
      keep_tokenizer(tokenizer, output)
      # Shards written before an interruption may have been touched since.
      check_files(output, manifest, checksums=True)
      files.write_json(output / manifests.FILE, dataclasses.asdict(manifest))
  shutil.rmtree(partial, ignore_errors=True)
  return manifest
