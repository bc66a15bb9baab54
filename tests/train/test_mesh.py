"""One device, eight simulated ones and several processes compute the same."""

import json

import pytest

from tests.support.mesh_worker import MESHES
from tests.support.training import finish, free_address, launch, train_words


def test_eight_devices_are_one(tmp_path):
  # One test, not many with a fixture, which each of pytest's processes would compute for itself.
  output = finish(launch(["-m", "tests.support.mesh_worker", str(tmp_path)], devices=8))
  rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
  reports = {row.pop("name"): row for row in rows}
  # Norms of a head stay whole, and a tiny model has many.
  assert reports.pop("share")["share"] <= 1.1
  assert reports.keys() == {*MESHES, "restored on 1", "restored on 4", "restored on 8"}
  assert all(error <= 1e-5 for row in reports.values() for error in row.values()), reports


def losses(workdir):
  rows = [json.loads(row) for row in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [row.get("loss", row.get("validation_loss")) for row in rows]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_are_one(corpus, tmp_path, count):
  mesh = ["--config.mesh.data=2", f"--config.mesh.fsdp={count // 2}"]
  many = [free_address(), f"--processes={count}", *mesh]
  processes = [
    launch(train_words(corpus, tmp_path / "many", *many, f"--rank={rank}")) for rank in range(count)
  ]
  for process in processes:
    finish(process)
  finish(launch(train_words(corpus, tmp_path / "one"), cache=tmp_path / "cache"))
  assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
  # And a run of many processes goes on in one.
  output = finish(launch(train_words(corpus, tmp_path / "many"), cache=tmp_path / "cache"))
  assert "resuming from step 12" in output
