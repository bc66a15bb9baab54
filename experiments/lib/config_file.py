"""The flag `--config`: a file with get_config(), its fields set one by one."""

from typing import Literal

from absl import flags
from ml_collections import config_flags

from experiments.lib import app

# Fields with a few named values, as `--config.model.remat=dots`; validate() knows the names.
config_flags.register_flag_parser_for_type(Literal, flags.ArgumentParser())

CONFIG = config_flags.DEFINE_config_file(
  "config", None, "File with get_config(); `--config.data.batch=8` sets a field of it."
)


def parse(argv: list[str]) -> list[str]:
  """Flags as absl parses them, but a wrong configuration is told in one sentence."""
  try:
    rest = app.parse(argv)
    _ = CONFIG.value and CONFIG.value.validate  # a file that was not found tells only now
    return rest
  except OSError as e:
    raise SystemExit(f"--config: there is no such file: {str(e).split()[-1]}") from e
  except (KeyError, AttributeError, TypeError, ValueError) as e:
    raise SystemExit(f"--config: {e.args[0] if e.args else e}") from e


def name() -> str:
  """What follows the colon of `--config=file.py:name`, or the file."""
  return flags.FLAGS["config"].serialize().removeprefix("--config=").rsplit(":", 1)[-1]
