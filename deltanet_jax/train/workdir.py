"""The folder of one run: what it was started with, and whether a new start may continue it."""

import json
import pathlib

from deltanet_jax.config import TrainConfig, from_json, to_json
from deltanet_jax.data import Task
from deltanet_jax.files import write_json
from deltanet_jax.mixers import mixer_config

FILE = "config.json"
LOCK = "lock"  # held by the training process; readers do not need it
VERSION = 2  # of what is in it
# What may be in a folder before its run has started.
_BEFORE = ("corpus", LOCK, "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
# What may change between two starts of one run: it moves work around, the result stays the same.
_FREE = (
  "mesh.",
  "checkpoint.",
  "data.corpus",  # a folder may move; that its text is the same is checked by content
  "data.workers",
  "data.scored",
  "grad_accum",
  "loss_chunk",
  "model.remat",
  "model.scan",
  "log_every",
  "eval_every",
  "eval_batches",
  "max_bad_updates",
)


def check(
  workdir: pathlib.Path, cfg: TrainConfig, *, initial: str | None = None, extend: bool = False
):
  """Refuses a folder that holds another run or something else; writes nothing.

  Args:
    initial: path of the weights that the run begins with; None also for one that goes on.
    extend: whether the run may go on to more tokens than it was started for.
  """
  path = workdir / FILE
  if not path.exists():
    if workdir.exists() and not workdir.is_dir():
      raise ValueError(f"{workdir} is a file: name a folder.")
    if workdir.exists() and any(p.name not in _BEFORE for p in workdir.iterdir()):
      raise ValueError(f"{workdir} holds files but no {FILE}: name an empty or a new folder.")
    if extend:
      raise ValueError(f"{workdir} has no run to extend: name its folder, or leave --extend out.")
    return
  values = _read(path)
  if "identity" not in values:
    raise ValueError(f"{workdir} holds exported weights, not a run: name another workdir.")
  now = json.loads(json.dumps(to_json(cfg)))
  kinds = [_mixer_kinds(config) for config in (values["config"], now)]
  if kinds[0] != kinds[1]:
    raise ValueError(
      f"{workdir} was started with the mixers {kinds[0]}, now they are {kinds[1]}: use the same, or"
      " another workdir."
    )
  old, new = _flat(values["config"]), _flat(now)
  for key in sorted(old.keys() | new.keys()):
    if old.get(key) != new.get(key) and not key.startswith(_FREE):
      more = key == "tokens" and new[key] > old[key]
      if more and extend:
        continue
      hint = ", or extend the run with --extend" if more else ""
      raise ValueError(
        f"{workdir} was started with {key} = {old.get(key)!r}, now it is {new.get(key)!r}:"
        f" use the same, or another workdir{hint}."
      )
  begun = begun_with(workdir)
  if initial is not None and (begun is None or begun["path"] != initial):
    told = "random weights" if begun is None else f"the weights of {begun['path']}"
    raise ValueError(
      f"{workdir} was started with {told}, not with {initial}: leave it out to go on, or name"
      " another workdir."
    )


def check_task(workdir: pathlib.Path, cfg: TrainConfig, task: Task):
  """Refuses a task that does not suit the configuration, or another one than before."""
  shape = (cfg.data.batch, cfg.data.length)
  if task.shape != shape:
    raise ValueError(f"the task's batches are {task.shape}, expected data.batch, length = {shape}.")
  if task.vocab > cfg.model.vocab:
    raise ValueError(
      f"model.vocab is {cfg.model.vocab}, less than the {task.vocab} tokens of the task."
    )
  if not (workdir / FILE).exists():
    return
  before = _read(workdir / FILE)["identity"]
  now = task.identity()
  for key in sorted(before.keys() | now.keys()):
    if before.get(key) != now.get(key):
      raise ValueError(
        f"{workdir} was started with another {key} ({str(before.get(key))[:12]}, now"
        f" {str(now.get(key))[:12]}): use the same, or another workdir."
      )


def write(workdir: pathlib.Path, cfg: TrainConfig, task: Task, origin: dict, initial: dict | None):
  """Writes what is compared when the run goes on, and where it came from, if it is new.

  Args:
    initial: of the weights that it begins with, where they came from; None if they are random.
  """
  path = workdir / FILE
  if path.exists():
    return
  task.keep(workdir)
  write_json(
    path,
    dict(
      version=VERSION,
      config=to_json(cfg),
      identity=task.identity(),
      task=task.describe(),
      origin=origin,
      initial=initial,
      extended=[],
    ),
  )


def begun_with(workdir: pathlib.Path) -> dict | None:
  """Where the weights came from that a run began with; None if they were random."""
  return history(_read(workdir / FILE))["initial"]


def extend(workdir: pathlib.Path, cfg: TrainConfig, step: int, origin: dict) -> int | None:
  """Notes that the run goes on from `step` to `cfg.tokens`; returns the tokens it had before.

  None if it has as many as it was started for, or was extended to.
  """
  path = workdir / FILE
  values = _read(path)
  before, extended = values["config"]["tokens"], history(values)["extended"]
  # Updates that were lost are made again, and with the learning rate of the longer run.
  extended = [one | dict(step=min(one["step"], step)) for one in extended]
  if before != cfg.tokens:
    extended.append({"step": step, "from": before, "to": cfg.tokens, "origin": origin})
  if extended != history(values)["extended"]:
    config = values["config"] | dict(tokens=cfg.tokens)
    write_json(path, values | dict(config=config, extended=extended))
  return None if before == cfg.tokens else before


def history(values: dict) -> dict:
  """Of a config.json: provenance, weights that were begun with, extensions; older ones lack two."""
  return dict(
    origin=values.get("origin", {}),
    initial=values.get("initial"),
    extended=values.get("extended", []),
  )


def is_ours(folder: str | pathlib.Path) -> bool:
  """Whether a folder is that of a run or of exported weights, and not a public checkpoint."""
  path = pathlib.Path(folder) / FILE
  return path.exists() and "config" in _json(path)


def is_run(folder: str | pathlib.Path) -> bool:
  """Whether a folder is that of a run, which has steps."""
  return "identity" in _read(pathlib.Path(folder) / FILE)


def read_config(workdir: pathlib.Path) -> tuple[TrainConfig, dict]:
  """The configuration of a run, and all else that was written beside it."""
  values = _read(workdir / FILE)
  return from_json(values["config"], mixer_config), values


def _read(path) -> dict:
  if not path.exists():
    raise ValueError(f"{path.parent} has no {FILE}: it is not the workdir of a run.")
  values = _json(path)
  if "config" not in values:
    raise ValueError(
      f"{path} is not of a run: a public checkpoint is read by load_fla, in commands --checkpoint."
    )
  version = values.get("version", 1)
  if version != VERSION:
    raise ValueError(
      f"{path} has format {version}, this version reads {VERSION}: use the version of the library"
      " that wrote it, or another workdir."
    )
  return values


def _json(path) -> dict:
  try:
    values = json.loads(path.read_text())
  except ValueError as e:
    raise ValueError(f"{path} is damaged ({e}): restore it, or name another folder.") from e
  return values if isinstance(values, dict) else {}


def _mixer_kinds(config: dict) -> list[str]:
  """Return the mixer of each layer of the pattern, without the names that a config gives them."""
  model = config["model"]
  return [model["mixers"][name]["kind"] for name in model["pattern"]]


def _flat(values, prefix="") -> dict:
  """Nested dictionaries as one, with dots in the names."""
  if not isinstance(values, dict):
    return {prefix[:-1]: values}
  flat = {}
  for name, value in values.items():
    flat |= _flat(value, f"{prefix}{name}.")
  return flat
