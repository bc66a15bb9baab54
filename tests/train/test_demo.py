"""Rerunning a completed demo does not change its summary."""

import json

import pytest

from tests.support.training import launch, wait_for_exit

CODE = """
import runpy, sys
from experiments.configs import demo
from tests.support.training import tiny
cfg = tiny()
cfg.model.vocab = 258
demo.get_config = lambda model: cfg
sys.argv = ["demo", *sys.argv[1:]]
runpy.run_module("experiments.demo", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_rerunning_the_demo_keeps_its_summary(tmp_path):
  start = lambda: wait_for_exit(launch(["-c", CODE, f"--out={tmp_path}"], cache=tmp_path / "cache"))
  start()
  summary = (tmp_path / "summary.json").read_bytes()
  assert json.loads(summary)["models"]["deltanet"]["seconds"] > 0
  start()
  assert (tmp_path / "summary.json").read_bytes() == summary
