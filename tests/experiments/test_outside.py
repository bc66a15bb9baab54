"""Mixers beside the same layers of other libraries."""

import pytest

from experiments.bench import outside
from experiments.lib import records


def test_missing_packages_are_one_sentence(tmp_path):
  python = tmp_path / "python"
  python.write_text("#!/bin/sh\necho \"No module named 'torch'\" >&2\nexit 1\n")
  python.chmod(0o755)
  with pytest.raises(ValueError, match="No module named 'torch'; in its environment, pip install"):
    outside.run_worker(str(python), tmp_path)
  with pytest.raises(ValueError, match="nowhere cannot be run: No such file"):
    outside.run_worker("nowhere", tmp_path)


def test_rows_agree_in_float32():
  rows = records.read("outside")
  assert len({row["key"]["mixer"] for row in rows}) >= 4
  for row in rows:
    figures = row["figures"]
    assert all(figures[x] < 1e-5 for x in ("output", "decoding", "input_gradient")), row
    # The mLSTM's is of a bias that the normaliser all but cancels.
    assert figures["weight_gradient"] < 1e-4, row
