"""`show_data` prints each target below its token."""

import subprocess
import sys

from experiments.lib import provenance
from tests.experiments.errors import errors_of


def show(*words):
  command = [sys.executable, "-m", "experiments.show_data", *words]
  return subprocess.run(
    command, cwd=provenance.CHECKOUT, capture_output=True, text=True, check=False
  )


def test_targets_are_below_their_tokens():
  done = show("--task=mqar", "--rows=1", "--vocab=64", "--length=24", "--pairs=3")
  assert done.returncode == 0 and "\033" not in done.stdout, done.stderr
  title, _, count, tokens, targets = done.stdout.rstrip().splitlines()
  assert title.startswith("MQAR of vocab 64, length 24, pairs 3")
  assert count == "example 0: 3 of 24 targets have a loss"
  tokens, targets = tokens.split(), targets.split()
  known = dict(zip(tokens[0:6:2], tokens[1:6:2]))
  asked = {key: value for key, value in zip(tokens, targets, strict=True) if value != "·"}
  assert asked == known


def test_flags_of_other_tasks_are_rejected():
  wrong = [["--task=parity", "--pairs=3"], ["--task=mad-memorize", "--setting=6"]]
  pairs, setting = errors_of("experiments.show_data", wrong)
  assert pairs == "parity has no --pairs: remove it."
  assert setting.startswith("--setting is 6, but mad-memorize has 0")
