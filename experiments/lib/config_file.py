"""The flag `--config`: a file with get_config(), and flags that set its fields."""

import dataclasses
import difflib
import inspect
import re
import sys
from typing import Literal

from absl import flags
from ml_collections import config_flags

from deltanet_jax.config import TrainConfig
from experiments.lib import app, config_help, config_modules, import_flag

# Literal fields, like `--config.model.remat=dots`; validate() checks their values.
config_flags.register_flag_parser_for_type(Literal, flags.ArgumentParser())

CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "File with get_config(): a name in experiments/configs, or a path; `--config.data.batch=8` sets a"
  " field.",
)


def parse(argv: list[str]) -> list[str]:
  """Parse flags like absl, but report a wrong config in one sentence.

  `--config=NAME` becomes the path of experiments/configs/NAME.py, and `--help` also lists the
  fields of a config.
  """
  if {"--help", "-help", "--helpshort", "-h", "-?"} & set(argv):
    main = sys.modules["__main__"]
    main.__doc__ = f"{main.__doc__}\n{config_help.text()}"
    return app.parse(argv)
  try:
    import_flag.import_modules_of(argv)
  except ValueError as e:
    raise SystemExit(f"--import: {e}") from e
  try:
    # Load the config once here: absl would report an exception as a traceback.
    for i, value in _values(argv):
      resolved = resolve(value)
      argv = [*argv[:i], argv[i].removesuffix(value) + resolved, *argv[i + 1 :]]
      _check_fields(load(resolved), argv)
    return app.parse(argv)
  except (KeyError, AttributeError, TypeError, ValueError) as e:
    raise SystemExit(f"--config: {e.args[0] if e.args else e}") from e


def _values(argv: list[str]) -> list[tuple[int, str]]:
  """Each value of --config, with the index of the argument that ends with it."""
  found = []
  for i, word in enumerate(argv):
    if match := re.fullmatch(r"--?config(=(.*))?", word):
      if match[1]:
        found.append((i, match[2]))
      elif i + 1 < len(argv):
        found.append((i + 1, argv[i + 1]))
  return [(i, value) for i, value in found if value]


def resolve(value: str) -> str:
  """The value of --config with a path: `lm:deltanet-340m` -> `.../lm.py:deltanet-340m`."""
  name, colon, argument = value.partition(":")
  return f"{config_modules.find(name)}{colon}{argument}"


def load(value: str) -> TrainConfig:
  """Call get_config of `NAME:argument` or `PATH:argument`.

  Raises:
    ValueError: the file cannot be imported or get_config fails; the message has file and line.
  """
  name, _, argument = value.partition(":")
  path = config_modules.find(name)
  module = config_modules.load(path)
  get = getattr(module, "get_config", None)
  if get is None:
    table = f": it is a sweep, see `python -m experiments.sweep --config={name} --list`"
    raise ValueError(
      f"{path} has no function get_config(){table if hasattr(module, 'ROWS') else ''}."
    )
  arguments = [argument] if argument else []
  try:
    inspect.signature(get).bind(*arguments)
  except TypeError as e:
    takes = "takes no name after the colon" if argument else "needs a name after the colon"
    raise ValueError(f"get_config of {path} {takes}.") from e
  try:
    cfg = get(*arguments)
  except ValueError as e:
    raise ValueError(f"{value}: {e}") from e
  except Exception as e:
    raise ValueError(config_modules.located(e, path)) from e
  if not isinstance(cfg, TrainConfig):
    raise ValueError(f"get_config of {path} returned {type(cfg).__name__}, expected TrainConfig.")
  return cfg


def _paths(part, prefix: str = "") -> list[str]:
  """Dotted names of all fields, including those of sections and mixers."""
  if isinstance(part, dict):
    own = part
  elif dataclasses.is_dataclass(part):
    own = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
  else:
    return []
  below = [path for name, value in own.items() for path in _paths(value, f"{prefix}{name}.")]
  return [f"{prefix}{name}" for name in own] + below


def _check_fields(cfg: TrainConfig, argv: list[str]):
  """ValueError for an unknown `--config.field`, with similar names."""
  known = _paths(cfg)
  for word in argv:
    found = re.match(r"--?(?:no)?config\.([^=]+)", word)
    name = found and re.sub(r"\[.*", "", found[1])
    if not found or name in known:
      continue
    leaf = name.rsplit(".", 1)[-1]
    leaves = {path.rsplit(".", 1)[-1] for path in known}
    alike = difflib.get_close_matches(leaf, leaves)
    # Fields of similar names in any section, sorted by similarity of the full name.
    near = [path for path in known if path.rsplit(".", 1)[-1] in alike]
    near.sort(key=lambda path: -difflib.SequenceMatcher(None, path, name).ratio())
    hint = f" (nearest: {', '.join(near[:3])})" if near else ""
    raise ValueError(f"there is no field {name}{hint}; --help lists them.")


def name() -> str:
  """The argument after the colon of `--config=file.py:name`, or the file."""
  return flags.FLAGS["config"].serialize().removeprefix("--config=").rsplit(":", 1)[-1]
