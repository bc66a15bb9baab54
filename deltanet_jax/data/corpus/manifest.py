"""What a prepared corpus says of itself: `manifest.json`, written last."""

import dataclasses
import json
import pathlib

FILE = "manifest.json"
VERSION = 1
TOKEN = "<u2"  # of the shards
START = "<i8"  # of the indices
MAX_VOCAB = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """`name`.bin holds the tokens of whole documents, `name`.idx where each of them begins."""

  name: str
  tokens: int
  documents: int
  bytes: int  # of the text in UTF-8
  bin_sha256: str
  idx_sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitInfo:
  tokens: int
  documents: int
  bytes: int
  shards: list[Shard]

  @classmethod
  def of(cls, shards: list[Shard]) -> "SplitInfo":
    """Sums over shards."""
    total = lambda name: sum(getattr(shard, name) for shard in shards)
    return cls(
      tokens=total("tokens"), documents=total("documents"), bytes=total("bytes"), shards=shards
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """All that the tokens depend on, besides the text itself."""

  tokenizer: str
  tokenizer_hash: str
  vocab: int
  bos: int
  validation: float  # share of the documents
  seed: int
  shard_tokens: int
  text_field: str
  sources: list[tuple[str, int]]  # names and bytes of the input files
  version: int = VERSION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  recipe: Recipe
  dropped: int  # documents without text
  train: SplitInfo
  validation: SplitInfo


def recipe_from(values: dict) -> Recipe:
  """A recipe from JSON."""
  sources = [tuple(source) for source in values["sources"]]
  return Recipe(**values | {"sources": sources})


def _split_from(values: dict) -> SplitInfo:
  return SplitInfo(**values | {"shards": [Shard(**shard) for shard in values["shards"]]})


def read_manifest(folder: pathlib.Path) -> Manifest:
  """The manifest of a finished corpus."""
  path = folder / FILE
  if not path.is_file():
    raise FileNotFoundError(
      f"{folder} has no {FILE}: it is no prepared corpus, or one whose preparation did not finish; "
      "run experiments.prepare_data (again, with the same flags)."
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
  raise ValueError(f"{path} has format {version}, this program reads {VERSION}: prepare it again.")
