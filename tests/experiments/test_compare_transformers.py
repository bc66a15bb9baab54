"""Comparison of mixers with layers of transformers."""

import pytest

from experiments.bench import compare_transformers
from experiments.lib import records


def test_missing_packages_are_one_sentence(tmp_path):
  python = tmp_path / "python"
  python.write_text("#!/bin/sh\necho \"No module named 'torch'\" >&2\nexit 1\n")
  python.chmod(0o755)
  with pytest.raises(ValueError, match="No module named 'torch'; in its environment, pip install"):
    compare_transformers.run_worker(str(python), tmp_path)
  with pytest.raises(ValueError, match="nowhere cannot be run: No such file"):
    compare_transformers.run_worker("nowhere", tmp_path)


def test_recorded_errors_are_small_in_float32():
  """Errors of all outputs are below 1e-5, those of most gradients too."""
  rows = records.read("compare_transformers")
  gradients = ("input_gradient", "weight_gradient")
  close = {row["key"]["mixer"] for row in rows if all(row["metrics"][x] < 1e-5 for x in gradients)}
  assert len(close) >= 4
  for row in rows:
    metrics = row["metrics"]
    assert all(metrics[x] < 1e-5 for x in ("output", "decoding")), row
    assert all(metrics[x] < 1e-4 for x in gradients), row
