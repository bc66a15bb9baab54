"""A mesh computes what one device does, for every mixer."""

import json

import pytest

from tests.support.mixers import CASES
from tests.support.training import launch, wait_for_exit

PARTS = 6  # processes, each with some of the mixers


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_mesh_changes_no_value_and_no_gradient(part):
  names = list(CASES)[part::PARTS]
  output = wait_for_exit(launch(["-m", "tests.support.mixer_mesh_worker", *names], devices=4))
  rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
  assert [row["name"] for row in rows] == names
  assert all(row["error"] < 1e-12 for row in rows), rows
