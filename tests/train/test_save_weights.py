"""`save_weights` of a model that no run trained."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import deltanet_jax
from deltanet_jax.models import build, preset
from deltanet_jax.train import InitFrom, load_trained, save_weights
from tests.support.training import tiny, train_on

TOKENS = jnp.arange(12, dtype=jnp.int32)[None]


@pytest.mark.parametrize("name", ["deltanet-tiny", "gated-deltanet-tiny", "transformer-tiny"])
def test_build_save_load_gives_equal_logits(tmp_path, name):
  model = build(preset(name, depth=2), seed=3)
  save_weights(model, tmp_path / "weights")
  loaded = load_trained(tmp_path / "weights")
  assert loaded.model.cfg == model.cfg and loaded.step == 0 and loaded.tokenizer is None
  np.testing.assert_array_equal(loaded.model(TOKENS), model(TOKENS))
  with pytest.raises(ValueError, match="is not empty"):
    save_weights(model, tmp_path / "weights")


def test_with_a_tokenizer(tmp_path):
  model = build(preset("deltanet-tiny", depth=1, vocab=258))
  deltanet_jax.save_weights(model, tmp_path / "weights", tokenizer="bytes")
  loaded = load_trained(tmp_path / "weights")
  assert loaded.tokenizer == "bytes"
  with pytest.raises(ValueError, match="a Trained has its own"):
    save_weights(loaded, tmp_path / "other", tokenizer="bytes")
  save_weights(loaded, tmp_path / "copy")
  assert load_trained(tmp_path / "copy").tokenizer == "bytes"
  small = build(preset("deltanet-tiny", depth=1, vocab=100))
  with pytest.raises(ValueError, match="258 ids, more than the 100 of the model: bytes is not"):
    save_weights(small, tmp_path / "small", tokenizer="bytes")


def test_a_run_can_be_initialized_from_it(corpus, tmp_path):
  cfg = tiny()
  save_weights(build(cfg.model, seed=5), tmp_path / "weights")
  train_on(corpus, cfg, tmp_path / "run", initial=InitFrom(tmp_path / "weights"))
  assert load_trained(tmp_path / "run").history["initial"]["path"] == str(tmp_path / "weights")


def test_a_changed_model_is_rejected(tmp_path):
  model = build(preset("deltanet-tiny", depth=1))
  model.extra = nnx.Param(jnp.ones(3))
  with pytest.raises(ValueError, match="weight extra differs from what the model's configuration"):
    save_weights(model, tmp_path / "weights")
  assert not (tmp_path / "weights").exists()
