"""The folder of one run: what it was started with, and whether a new start may continue it."""

import hashlib
import json
import pathlib

from deltanet_jax.config import TrainConfig, from_json, to_json
from deltanet_jax.data import Corpus

FILE = "config.json"
# What may change between two starts of one run: it moves work around, the result stays the same.
_FREE = (
  "mesh.",
  "checkpoint.",
  "data.corpus",  # a folder may move; that its text is the same is checked by content
  "data.workers",
  "grad_accum",
  "loss_chunk",
  "model.remat",
  "model.scan",
  "log_every",
  "eval_every",
  "eval_batches",
  "max_bad_updates",
)


def corpus_hash(corpus: Corpus) -> str:
  """Identifies tokens and order, wherever the files lie."""
  shards = corpus.manifest.train.shards + corpus.manifest.validation.shards
  sums = [corpus.manifest.recipe.tokenizer_hash, *(shard.bin_sha256 for shard in shards)]
  return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def check(workdir: pathlib.Path, cfg: TrainConfig):
  """Refuses a folder that holds another run or something else; writes nothing."""
  path = workdir / FILE
  if not path.exists():
    if workdir.exists() and any(p.name != "corpus" for p in workdir.iterdir()):
      raise ValueError(f"{workdir} holds files but no {FILE}: name an empty or a new folder.")
    return
  old, new = _flat(_read(path)["config"]), _flat(json.loads(json.dumps(to_json(cfg))))
  for key in sorted(old.keys() | new.keys()):
    if old.get(key) != new.get(key) and not key.startswith(_FREE):
      raise ValueError(
        f"{workdir} was started with {key} = {old.get(key)!r}, now it is {new.get(key)!r}:"
        " use the same, or another workdir."
      )


def check_identity(workdir: pathlib.Path, identity: dict):
  """Refuses to go on with another corpus or tokenizer, named by their hashes."""
  if not (workdir / FILE).exists():
    return
  before = _read(workdir / FILE)
  for key, value in identity.items():
    if before[key] != value:
      raise ValueError(
        f"{workdir} was started with another {key} ({before[key][:12]}, now {value[:12]}):"
        " use the same, or another workdir."
      )


def write(workdir: pathlib.Path, cfg: TrainConfig, identity: dict, origin: dict):
  """Writes what `check` compares, if the run is new, and where it came from."""
  path = workdir / FILE
  if path.exists():
    return
  workdir.mkdir(parents=True, exist_ok=True)
  new = path.with_name(FILE + ".new")
  new.write_text(json.dumps(dict(config=to_json(cfg), **identity, origin=origin), indent=1) + "\n")
  new.replace(path)


def read_config(workdir: pathlib.Path) -> tuple[TrainConfig, dict]:
  """The configuration of a run, and all else that was written beside it."""
  values = _read(workdir / FILE)
  return from_json(values["config"]), values


def _read(path) -> dict:
  if not path.exists():
    raise ValueError(f"{path.parent} has no {FILE}: it is not the workdir of a run.")
  try:
    return json.loads(path.read_text())
  except ValueError as e:
    raise ValueError(f"{path} is damaged ({e}): restore it, or start in another workdir.") from e


def _flat(values, prefix="") -> dict:
  """Nested dictionaries as one, with dots in the names."""
  if not isinstance(values, dict):
    return {prefix[:-1]: values}
  flat = {}
  for name, value in values.items():
    flat |= _flat(value, f"{prefix}{name}.")
  return flat
