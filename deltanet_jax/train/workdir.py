"""The workdir of a run: config.json, and the checks whether a new start may resume it."""

import dataclasses
import json
import pathlib

from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  from_json,
  to_json,
)
from deltanet_jax.data import Task
from deltanet_jax.files import as_path, write_json
from deltanet_jax.mixers import import_paths, mixer_config

FILE = "config.json"
LOCK = "lock"  # held by the training process; readers do not need it
VERSION = 2  # of the format of config.json
# Files that may exist in a workdir before its run starts.
_BEFORE_START = (
  "corpus",
  LOCK,
  "lease",
  "tokenizer.json",
  "tokenizer_config.json",
  "tokenizer.model",
)
# Fields that may change when a run is resumed: they affect how it is computed, not its result.
_MAY_CHANGE = (
  "mesh.",
  "checkpoint.",
  "data.corpus",  # the folder may move; the identity of the task compares its content
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
# Sections of a config, whose fields that an older version did not write have their default.
_SECTIONS = dict(
  model=ModelConfig,
  data=DataConfig,
  optimizer=OptimizerConfig,
  mesh=MeshConfig,
  checkpoint=CheckpointConfig,
)


def check(
  workdir: pathlib.Path,
  cfg: TrainConfig,
  *,
  initial: str | None = None,
  extend: bool = False,
  own_optimizer: dict[str, str] | None = None,
):
  """Raise ValueError if the folder holds another run or other files; writes nothing.

  Args:
    initial: path of the initial weights, if the caller names one.
    extend: whether `cfg.tokens` may be larger than that of the run.
    own_optimizer: structure of the state of the caller's own optimizer, if it passes one.
  """
  mixer_paths(cfg)
  if not (workdir / FILE).exists():
    _check_new(workdir, extend)
    return
  values = _read(workdir / FILE)
  if "identity" not in values:
    raise ValueError(f"{workdir} holds exported weights, not a run: name another workdir.")
  _check_optimizer(workdir, values, own_optimizer)
  unused = () if own_optimizer is None else ("optimizer.",)
  new = json.loads(json.dumps(to_json(cfg)))
  _check_config(workdir, _with_defaults(values["config"]), new, extend, (*_MAY_CHANGE, *unused))
  if initial is not None:
    _check_initial(workdir, initial)


def _check_new(workdir, extend):
  if workdir.exists() and not workdir.is_dir():
    raise ValueError(f"{workdir} is a file: name a folder.")
  if workdir.exists() and any(p.name not in _BEFORE_START for p in workdir.iterdir()):
    raise ValueError(f"{workdir} holds files but no {FILE}: name an empty or a new folder.")
  if extend:
    raise ValueError(f"{workdir} has no run to extend: name its folder, or leave --extend out.")


def _check_optimizer(workdir, values, new):
  old = values.get("own_optimizer")
  if old == new:
    return
  named = f"optimizer.name = {values['config']['optimizer'].get('name', 'adamw')!r}"
  if old is None:
    raise ValueError(
      f"{workdir} was started with {named}, now optimizer= is another optimizer: leave it out, or"
      " use another workdir."
    )
  if new is None:
    raise ValueError(
      f"{workdir} was started with an optimizer of its own, now it is not given: pass the same as"
      " optimizer=, or use another workdir."
    )
  path = min(p for p in old.keys() | new.keys() if old.get(p) != new.get(p))
  raise ValueError(
    f"{workdir} was started with an optimizer whose state{path} is {old.get(path, 'absent')}, now"
    f" it is {new.get(path, 'absent')}: pass the same optimizer, or use another workdir."
  )


def _with_defaults(config: dict) -> dict:
  """Return a config with the default of each field that an older version did not have."""
  filled = _defaults(TrainConfig) | config
  return filled | {name: _defaults(cls) | config[name] for name, cls in _SECTIONS.items()}


def _defaults(cls) -> dict:
  fields = dataclasses.fields(cls)
  return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def _check_config(workdir, old, new, extend, may_change):
  kinds = [_mixer_kinds(config) for config in (old, new)]
  if kinds[0] != kinds[1]:
    raise ValueError(
      f"{workdir} was started with the mixers {kinds[0]}, now they are {kinds[1]}: use the same, or"
      " another workdir."
    )
  old, new = _flatten(old), _flatten(new)
  for key in sorted(old.keys() | new.keys()):
    if old.get(key) == new.get(key) or key.startswith(may_change):
      continue
    longer = key == "tokens" and new[key] > old[key]
    if longer and extend:
      continue
    hint = ", or extend the run with --extend" if longer else ""
    raise ValueError(
      f"{workdir} was started with {key} = {old.get(key)!r}, now it is {new.get(key)!r}:"
      f" use the same, or another workdir{hint}."
    )


def _check_initial(workdir, initial):
  origin = initial_origin(workdir)
  if origin is None or origin["path"] != initial:
    started = "random weights" if origin is None else f"the weights of {origin['path']}"
    raise ValueError(
      f"{workdir} was started with {started}, not with {initial}: leave --init_from out to resume,"
      " or name another workdir."
    )


def check_task(workdir: pathlib.Path, cfg: TrainConfig, task: Task):
  """Raise ValueError if the task does not fit the config, or is not the task of the run."""
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


def write(
  workdir: pathlib.Path,
  cfg: TrainConfig,
  task: Task,
  origin: dict,
  initial: dict | None,
  own_optimizer: dict[str, str] | None = None,
):
  """Write config.json of a new run: what a resume is compared with, and provenance.

  Args:
    initial: origin of the initial weights; None if they are random.
    own_optimizer: structure of the state of an optimizer passed to `train`; None without one.
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
      mixers=mixer_paths(cfg),
      identity=task.identity(),
      task=task.describe(),
      origin=origin,
      initial=initial,
      extended=[],
      own_optimizer=own_optimizer,
    ),
  )


def mixer_paths(cfg: TrainConfig) -> dict[str, str]:
  """Return the import paths of the config's mixers, by kind, that are not this package's own."""
  return import_paths(mixer.kind for mixer in cfg.model.mixers.values())


def initial_origin(workdir: pathlib.Path) -> dict | None:
  """Return the origin of a run's initial weights; None if they were random."""
  return history(_read(workdir / FILE))["initial"]


def extend(workdir: pathlib.Path, cfg: TrainConfig, step: int, origin: dict) -> int | None:
  """Record that the run continues from `step` to `cfg.tokens`; return its tokens before that.

  Returns None if `cfg.tokens` is unchanged.
  """
  path = workdir / FILE
  values = _read(path)
  before, extended = values["config"]["tokens"], history(values)["extended"]
  # Updates after the last checkpoint are repeated with the learning rate of the longer run.
  extended = [one | dict(step=min(one["step"], step)) for one in extended]
  if before != cfg.tokens:
    extended.append({"step": step, "from": before, "to": cfg.tokens, "origin": origin})
  if extended != history(values)["extended"]:
    config = values["config"] | dict(tokens=cfg.tokens)
    write_json(path, values | dict(config=config, extended=extended))
  return None if before == cfg.tokens else before


def history(values: dict) -> dict:
  """Return provenance, initial weights and extensions of a config.json; old files lack some."""
  return dict(
    origin=values.get("origin", {}),
    initial=values.get("initial"),
    extended=values.get("extended", []),
  )


def is_ours(folder: str | pathlib.Path) -> bool:
  """Whether a folder holds a run or exported weights, not a public checkpoint."""
  path = as_path(folder) / FILE
  return path.exists() and "config" in _json(path)


def is_run(folder: str | pathlib.Path) -> bool:
  """Whether a folder holds a run, which has checkpoints by step, not exported weights."""
  return "identity" in _read(as_path(folder) / FILE)


def read_config(workdir: pathlib.Path) -> tuple[TrainConfig, dict]:
  """Return the config of a run, and all values of its config.json.

  Imports the modules of mixers that are not this package's own.

  Raises:
    ValueError: the folder holds no run, or a mixer cannot be imported.
  """
  values = _read(workdir / FILE)
  paths = values.get("mixers", {})  # absent before version 0.3
  return from_json(values["config"], lambda kind: mixer_config(kind, paths.get(kind))), values


def _read(path) -> dict:
  if not path.exists():
    raise ValueError(f"{path.parent} has no {FILE}: it is not the workdir of a run.")
  values = _json(path)
  if "config" not in values:
    raise ValueError(
      f"{path} is not of a run: read a public checkpoint with load_fla, in commands with"
      " --checkpoint."
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
  """Return the mixer kinds of the layer pattern; their names are arbitrary."""
  model = config["model"]
  return [model["mixers"][name]["kind"] for name in model["pattern"]]


def _flatten(values, prefix="") -> dict:
  """Flatten nested dictionaries, joining names with dots."""
  if not isinstance(values, dict):
    return {prefix[:-1]: values}
  flat = {}
  for name, value in values.items():
    flat |= _flatten(value, f"{prefix}{name}.")
  return flat
