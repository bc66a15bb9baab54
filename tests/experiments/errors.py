"""Errors of a command with several sets of flags, in one process: its imports take seconds."""

import json
import subprocess
import sys

from experiments.lib import provenance

_CODE = """
import importlib, json, sys
from absl import flags
from absl.testing import flagsaver
module = importlib.import_module(sys.argv[1])
for words in json.loads(sys.argv[2]):
  with flagsaver.flagsaver():
    flags.FLAGS([sys.argv[1], *words])
    try:
      module.main()
    except (ValueError, OSError) as e:
      print(json.dumps(str(e)))
    else:
      print(json.dumps(None))
"""


def errors_of(module: str, flags: list[list[str]]) -> list[str | None]:
  """Messages of the exceptions that main() raises with each of the flags; None without one."""
  command = [sys.executable, "-c", _CODE, module, json.dumps(flags)]
  done = subprocess.run(command, cwd=provenance.CHECKOUT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()]
