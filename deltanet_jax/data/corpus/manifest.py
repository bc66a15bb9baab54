"""What a prepared corpus says of itself: `manifest.json`, written last."""

import dataclasses
import json
import pathlib

FILE = "manifest.json"
VERSION = 2
START = "<i8"  # of the indices


def token_dtype(vocab: int) -> str:
  """Of the shards: two bytes where ids fit."""
  return "<u2" if vocab <= 1 << 16 else "<u4"


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

  tokenizer: str  # its name, or the file in this folder that it is read from
  tokenizer_hash: str
  vocab: int
  bos: int
  eos: int | None  # that ends each document, if any does
  validation: float  # share of the text's bytes; 0 if it has input of its own
  seed: int
  shard_tokens: int
  text_field: str
  sources: list[tuple[str, str]]  # names and sha256 of the input files
  validation_sources: list[tuple[str, str]]
  version: int = VERSION

  def different(self, other: "Recipe") -> list[str]:
    """Names of what is not the same; of the input only the content counts, in its order."""
    values = [dataclasses.asdict(recipe) for recipe in (self, other)]
    for one in values:
      for name in ("sources", "validation_sources"):
        one[name] = [checksum for _, checksum in one[name]]
    return [name for name in values[0] if values[0][name] != values[1][name]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  recipe: Recipe
  dropped: int  # documents without text
  train: SplitInfo
  validation: SplitInfo


def recipe_from(values: dict) -> Recipe:
  """A recipe from JSON."""
  lists = {name: [tuple(x) for x in values[name]] for name in ("sources", "validation_sources")}
  return Recipe(**values | lists)


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
