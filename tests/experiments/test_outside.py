"""Mixers beside the same layers of other libraries."""

import pytest

from experiments.bench import outside


def test_missing_packages_are_one_sentence(tmp_path):
  python = tmp_path / "python"
  python.write_text("#!/bin/sh\necho \"No module named 'torch'\" >&2\nexit 1\n")
  python.chmod(0o755)
  with pytest.raises(ValueError, match="No module named 'torch'; in its environment, pip install"):
    outside.run_worker(str(python), tmp_path)
  with pytest.raises(ValueError, match="nowhere cannot be run: No such file"):
    outside.run_worker("nowhere", tmp_path)
