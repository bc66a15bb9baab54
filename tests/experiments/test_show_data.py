"""`show_data` prints each target below its token."""

import subprocess
import sys

import pytest

from experiments.lib import provenance


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


@pytest.mark.parametrize(
  "words, expected",
  [
    (["--task=parity", "--pairs=3"], "show_data: parity has no --pairs: remove it."),
    (["--task=mad-memorize", "--setting=6"], "show_data: --setting is 6, but mad-memorize has 0"),
  ],
)
def test_flags_of_other_tasks_are_rejected(words, expected):
  done = show(*words)
  assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
  # The last line: jax logs before it where GPU compilers are installed.
  assert done.stderr.strip().splitlines()[-1].startswith(expected)
