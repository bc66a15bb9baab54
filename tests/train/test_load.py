"""Loading and exporting trained models."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.config import from_json, to_json
from deltanet_jax.interop import load_fla, save_fla
from deltanet_jax.mixers import mixer_config
from deltanet_jax.models.abstract import weights_of
from deltanet_jax.train import check_start, load_trained, save_weights
from tests.support.training import tiny, train_on


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("export") / "run"
  train_on(corpus, tiny(), workdir)
  return workdir


def test_export_and_load(run, tmp_path):
  trained = load_trained(run)
  assert trained.step == 12 and trained.config == tiny()
  tokens = jnp.arange(12, dtype=jnp.int32)[None]
  expected = trained.model(tokens)
  save_weights(trained, tmp_path / "weights")
  save_fla(trained.model, tmp_path / "fla")
  again = load_trained(tmp_path / "weights")
  assert again.tokenizer == trained.tokenizer == "bytes" and again.step == 12
  np.testing.assert_array_equal(again.model(tokens), expected)
  public = load_fla(tmp_path / "fla")
  jax.tree.map(np.testing.assert_array_equal, weights_of(public), weights_of(trained.model))
  # The format does not store the chunk size, so the summation order differs.
  np.testing.assert_allclose(public(tokens), expected, rtol=1e-4, atol=1e-5)
  with pytest.raises(ValueError, match="is not empty"):
    save_weights(trained, tmp_path / "weights")


def test_a_folder_without_a_run_raises(tmp_path):
  with pytest.raises(ValueError, match="is not the workdir of a run"):
    load_trained(tmp_path)


def test_config_json_round_trip():
  assert from_json(to_json(tiny()), mixer_config) == tiny()
  with pytest.raises(ValueError, match="unknown or missing fields"):
    from_json(to_json(tiny()) | {"colour": "blue"}, mixer_config)


def test_an_old_config_format_raises(run, tmp_path):
  values = json.loads((run / "config.json").read_text())
  del values["version"]
  (tmp_path / "config.json").write_text(json.dumps(values))
  for read in (load_trained, lambda folder: check_start(tiny(), folder)):
    with pytest.raises(ValueError, match=r"has format 1, this version reads 2: use the version"):
      read(tmp_path)
