"""Mixers whose heads share weights or states of two parts: a mesh computes what one device does."""

import json

import pytest

from tests.support.training import finish, launch

NAMES = ("linear_attention_normalized", "gated_rfa", "dfw", "abc", "gsa")


@pytest.mark.slow
def test_a_mesh_changes_no_value_and_no_gradient():
  output = finish(launch(["-m", "tests.support.mixer_mesh_worker", *NAMES], devices=4))
  rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
  assert [row["name"] for row in rows] == list(NAMES)
  assert all(row["error"] < 1e-12 for row in rows), rows
