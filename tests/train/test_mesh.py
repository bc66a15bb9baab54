"""One device, eight simulated devices and several processes compute the same."""

import json

import pytest

from tests.support.mesh_worker import MESHES
from tests.support.training import (
  free_address,
  launch,
  numbers,
  tiny,
  train_on,
  train_words,
  wait_for_exit,
)


def test_eight_devices_match_one(tmp_path):
  # One test: a fixture would run in every worker process of pytest.
  output = wait_for_exit(launch(["-m", "tests.support.mesh_worker", str(tmp_path)], devices=8))
  rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
  reports = {row.pop("name"): row for row in rows}
  # Per-head norms are replicated, and are a large part of a tiny model.
  assert reports.pop("share")["share"] <= 1.1
  assert reports.keys() == {*MESHES, "restored on 1", "restored on 8"}
  assert all(error <= 1e-5 for row in reports.values() for error in row.values()), reports


def losses(workdir):
  return [row.get("loss", row.get("validation_loss")) for row in numbers(workdir)]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_match_one(corpus, tmp_path, count):
  mesh = ["--config.mesh.data=2", f"--config.mesh.fsdp={count // 2}"]
  many = [free_address(), f"--processes={count}", *mesh]
  processes = [
    launch(train_words(corpus, tmp_path / "many", *many, f"--rank={rank}")) for rank in range(count)
  ]
  for process in processes:
    wait_for_exit(process)
  train_on(corpus, tiny(), tmp_path / "one")
  assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
  # One process resumes a run of many.
  reports = []
  train_on(corpus, tiny(), tmp_path / "many", report=reports.append)
  assert reports == ["resuming from step 12 of 12"]
