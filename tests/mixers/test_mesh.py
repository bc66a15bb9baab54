"""Every mixer computes the same on a sharded mesh as on one device."""

import json

import pytest

from tests.support.mixers import CASES
from tests.support.training import finish, launch

PARTS = 6  # processes, each with a part of the mixers


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_sharding_changes_no_value_and_no_gradient(part):
  names = list(CASES)[part::PARTS]
  output = finish(launch(["-m", "tests.support.mixer_mesh_worker", *names], devices=4))
  results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
  assert [result["name"] for result in results] == names
  assert all(result["error"] < 1e-12 for result in results), results
