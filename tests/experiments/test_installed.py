"""Commands outside the repository: configs of the package, results in the working directory."""

import pathlib

import pytest

import deltanet_jax
from experiments.lib import config_modules, provenance, records


def test_configs_are_found_in_the_package(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  builtin = config_modules.FOLDER / "tiny.py"
  assert config_modules.find("tiny") == builtin
  assert config_modules.find("experiments/configs/tiny.py") == builtin
  with pytest.raises(ValueError, match="no such file"):
    config_modules.find("configs/tiny.py")
  own = pathlib.Path("experiments/configs/tiny.py")
  own.parent.mkdir(parents=True)
  own.write_text("")
  assert config_modules.find("experiments/configs/tiny.py") == own


def test_records_of_a_release(monkeypatch):
  assert records.results() == provenance.CHECKOUT / "experiments/results"
  monkeypatch.setattr(provenance, "INSTALLED", True)
  assert records.results() == pathlib.Path("results")
  origin = provenance.describe()
  assert origin["commit"] == f"version {deltanet_jax.__version__}" and "modified" not in origin
