"""The flag `--config`: a file with get_config(), its fields set one by one."""

import dataclasses
import difflib
import importlib.util
import inspect
import pathlib
import re
import sys
import traceback
from typing import Literal

from absl import flags
from ml_collections import config_flags

from deltanet_jax.config import TrainConfig
from experiments.lib import app, config_help

# Fields with a few named values, as `--config.model.remat=dots`; validate() knows the names.
config_flags.register_flag_parser_for_type(Literal, flags.ArgumentParser())

CONFIG = config_flags.DEFINE_config_file(
  "config", None, "File with get_config(); `--config.data.batch=8` sets a field of it."
)


def parse(argv: list[str]) -> list[str]:
  """Flags as absl parses them, but a wrong configuration is told in one sentence.

  And help lists the fields of a configuration.
  """
  if {"--help", "-help", "--helpshort", "-h", "-?"} & set(argv):
    main = sys.modules["__main__"]
    main.__doc__ = f"{main.__doc__}\n{config_help.text()}"
    return app.parse(argv)
  try:
    # First by itself: absl would wrap what goes wrong into a traceback.
    if value := _value(argv):
      _check_fields(load(value), argv)
    return app.parse(argv)
  except (KeyError, AttributeError, TypeError, ValueError) as e:
    raise SystemExit(f"--config: {e.args[0] if e.args else e}") from e


def _value(argv: list[str]) -> str | None:
  """What the flag is set to."""
  for i, word in enumerate(argv):
    if found := re.fullmatch(r"--?config(=(.*))?", word):
      return found[2] if found[1] else (argv[i + 1] if i + 1 < len(argv) else None)
  return None


def load(value: str) -> TrainConfig:
  """What get_config of `file.py:name` returns; ValueError with file and line where it fails."""
  path, _, argument = value.partition(":")
  if not pathlib.Path(path).is_file():
    raise ValueError(f"there is no such file: {path!r}")
  spec = importlib.util.spec_from_file_location("config_to_check", path)
  if spec is None:
    raise ValueError(f"{path} is no Python file.")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except Exception as e:
    raise ValueError(_where(e, path)) from e
  get = getattr(module, "get_config", None)
  if get is None:
    raise ValueError(f"{path} has no function get_config().")
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
    raise ValueError(_where(e, path)) from e
  if not isinstance(cfg, TrainConfig):
    raise ValueError(f"get_config of {path} returned {type(cfg).__name__}, expected TrainConfig.")
  return cfg


def _where(error: Exception, path: str) -> str:
  """The line of the file that failed, and how."""
  if isinstance(error, SyntaxError):
    return f"{error.filename}, line {error.lineno}: {error.msg}."
  lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == path]
  line = f", line {lines[-1]}" if lines else ""
  return f"{path}{line}: {type(error).__name__}: {str(error).rstrip('.')}."


def _paths(part, prefix: str = "") -> list[str]:
  """Names of all fields, those of sections and mixers with dots."""
  if isinstance(part, dict):
    own = part
  elif dataclasses.is_dataclass(part):
    own = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
  else:
    return []
  below = [path for name, value in own.items() for path in _paths(value, f"{prefix}{name}.")]
  return [f"{prefix}{name}" for name in own] + below


def _check_fields(cfg: TrainConfig, argv: list[str]):
  """Refuses `--config.field` where there is none, with the names nearest to it."""
  known = _paths(cfg)
  for word in argv:
    found = re.match(r"--?(?:no)?config\.([^=]+)", word)
    name = found and re.sub(r"\[.*", "", found[1])
    if not found or name in known:
      continue
    leaf = name.rsplit(".", 1)[-1]
    leaves = {path.rsplit(".", 1)[-1] for path in known}
    alike = difflib.get_close_matches(leaf, leaves)
    # Fields called nearly so, wherever they are, the most alike in all first.
    near = [path for path in known if path.rsplit(".", 1)[-1] in alike]
    near.sort(key=lambda path: -difflib.SequenceMatcher(None, path, name).ratio())
    hint = f" (nearest: {', '.join(near[:3])})" if near else ""
    raise ValueError(f"there is no field {name}{hint}; --help lists them.")


def name() -> str:
  """What follows the colon of `--config=file.py:name`, or the file."""
  return flags.FLAGS["config"].serialize().removeprefix("--config=").rsplit(":", 1)[-1]
