"""Training in float64 needs JAX's 64-bit types and raises without them."""

import jax
import pytest

from deltanet_jax.train import check_start, load_trained
from deltanet_jax.train.step import make_trainer
from tests.support.training import numbers, tiny, train_on


def float64(**changes):
  cfg = tiny(**changes)
  cfg.model.dtype = "float64"
  return cfg


@pytest.mark.parametrize("grad_accum", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_float64_training(corpus, tmp_path, grad_accum):
  train_on(corpus, tiny(), tmp_path / "float32")
  jax.config.update("jax_enable_x64", True)
  try:
    cfg = float64(grad_accum=grad_accum)
    trainer = make_trainer(cfg)
    with jax.set_mesh(trainer.mesh):
      shapes = jax.eval_shape(trainer.update, trainer.state_shapes(), trainer.batch_shapes(), 1e-3)
    assert shapes[1]["loss"].dtype == "float64"
    train_on(corpus, cfg, tmp_path / "run")
    assert load_trained(tmp_path / "run").step == 12
  finally:
    jax.config.update("jax_enable_x64", False)
  losses, float32_losses = (
    [row["loss"] for row in numbers(tmp_path / name) if "loss" in row]
    for name in ("run", "float32")
  )
  assert losses == pytest.approx(float32_losses, rel=1e-3) and losses != float32_losses


def test_float64_without_x64_raises(tmp_path):
  with pytest.raises(ValueError, match=r"'float64' needs JAX's 64-bit types: set JAX_ENABLE_X64=1"):
    check_start(float64(), tmp_path / "run")
  assert not (tmp_path / "run").exists()
