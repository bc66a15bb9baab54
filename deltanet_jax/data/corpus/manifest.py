"""Manifest of a prepared corpus: `manifest.json`, written last."""

import dataclasses
import json
import pathlib

FILE = "manifest.json"
VERSION = 2
START = "<i8"  # dtype of document offsets in .idx files


def token_dtype(vocab: int) -> str:
  """Return the dtype of tokens on disk: uint16 if the vocabulary fits, else uint32."""
  return "<u2" if vocab <= 1 << 16 else "<u4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """`name`.bin has the tokens of complete documents, `name`.idx the offset of each document."""

  name: str
  tokens: int
  documents: int
  bytes: int  # UTF-8 text
  bin_sha256: str
  idx_sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitInfo:
  """Shards of one split and their totals."""

  tokens: int
  documents: int
  bytes: int
  shards: list[Shard]

  @classmethod
  def of(cls, shards: list[Shard]) -> "SplitInfo":
    """Return the totals of shards."""
    total = lambda name: sum(getattr(shard, name) for shard in shards)
    return cls(
      tokens=total("tokens"), documents=total("documents"), bytes=total("bytes"), shards=shards
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """All settings and inputs that determine the tokens of a corpus."""

  tokenizer: str  # its name, or its file in the corpus folder
  tokenizer_hash: str
  vocab: int
  bos: int
  eos: int | None  # appended to each document; None for no EOS
  validation: float  # fraction of the text's bytes; 0 if validation has separate input files
  seed: int
  shard_tokens: int
  text_field: str
  sources: list[tuple[str, str]]  # name and SHA-256 of each input file
  validation_sources: list[tuple[str, str]]
  version: int = VERSION

  def different(self, other: "Recipe") -> list[str]:
    """Return names of fields that differ; input files are compared by content, not by name."""
    values = [dataclasses.asdict(recipe) for recipe in (self, other)]
    for one in values:
      for name in ("sources", "validation_sources"):
        one[name] = [checksum for _, checksum in one[name]]
    return [name for name in values[0] if values[0][name] != values[1][name]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """Contents of `manifest.json`."""

  recipe: Recipe
  dropped: int  # documents without text
  train: SplitInfo
  validation: SplitInfo


def recipe_from(values: dict) -> Recipe:
  """Build a recipe from JSON values."""
  lists = {name: [tuple(x) for x in values[name]] for name in ("sources", "validation_sources")}
  return Recipe(**values | lists)


def _split_from(values: dict) -> SplitInfo:
  return SplitInfo(**values | {"shards": [Shard(**shard) for shard in values["shards"]]})


def read_manifest(folder: pathlib.Path) -> Manifest:
  """Read the manifest of a complete corpus."""
  path = folder / FILE
  if not path.is_file():
    raise FileNotFoundError(
      f"{folder} has no {FILE}: it is not a prepared corpus, or its preparation is incomplete. Run"
      " experiments.prepare_data; with the same flags it resumes."
    )
  try:
    values = json.loads(path.read_text())
    version = values["recipe"]["version"]
    if version == VERSION:
      return Manifest(
        recipe=recipe_from(values["recipe"]),
        dropped=values["dropped"],
        train=_split_from(values["train"]),
        validation=_split_from(values["validation"]),
      )
  except (ValueError, KeyError, TypeError) as e:
    raise ValueError(f"{path} is damaged ({e!r}): delete {folder} and prepare it again.") from e
  raise ValueError(
    f"{path} has format version {version}, expected {VERSION}: prepare the corpus again."
  )
