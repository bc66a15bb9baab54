"""The flag `--import`: modules of the user's that a command imports before it does anything."""

import re
from collections.abc import Sequence

from absl import flags

from deltanet_jax import plugins

_IMPORT = flags.DEFINE_multi_string(
  "import",
  [],
  "Module of yours to import first, by name or as the path of a .py file; one that registers a"
  " mixer, for instance. Repeatable.",
)


def import_modules():
  """Import the modules that `--import` names; ValueError if one fails."""
  for name in _IMPORT.value:
    plugins.import_module(name)


def import_modules_of(argv: Sequence[str]):
  """Import the modules of `--import` before flags are parsed: a config file may need them."""
  for i, word in enumerate(argv):
    if match := re.fullmatch(r"--?import(=(.*))?", word, re.DOTALL):
      name = match[2] if match[1] else "".join(argv[i + 1 : i + 2])
      plugins.import_module(name)


def flags_of_imports() -> list[str]:
  """The `--import` flags of this command, for a process that it starts."""
  return [f"--import={name}" for name in _IMPORT.value]
