"""The Python blocks of README.md run as pasted, each section in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def python_blocks() -> dict[str, str]:
  """Return the Python code of each section by its title."""
  sections = re.split(r"^## (.*)\n", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
  blocks = {
    title: "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for title, text in zip(sections[1::2], sections[2::2])
  }
  return {title: code for title, code in blocks.items() if code}


SLOW = ("A model", "Training")


@pytest.mark.parametrize(
  "title",
  [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in python_blocks()],
)
def test_the_examples_run(title, tmp_path):
  command = [sys.executable, "-c", python_blocks()[title]]
  env = os.environ | {"PYTHONPATH": str(ROOT)}
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
