"""Training in float64: with jax's 64-bit types it is that, without them it is refused."""

import jax
import pytest

from deltanet_jax.train import check_start, load_trained
from deltanet_jax.train.step import make_trainer
from tests.support.training import numbers, tiny, train_on


def wide(**changes):
  cfg = tiny(**changes)
  cfg.model.dtype = "float64"
  return cfg


@pytest.mark.parametrize("grad_accum", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_with_64_bits(corpus, tmp_path, grad_accum):
  train_on(corpus, tiny(), tmp_path / "narrow")
  jax.config.update("jax_enable_x64", True)
  try:
    cfg = wide(grad_accum=grad_accum)
    trainer = make_trainer(cfg)
    with jax.set_mesh(trainer.mesh):
      shapes = jax.eval_shape(trainer.update, trainer.state_shapes(), trainer.batch_shapes(), 1e-3)
    assert shapes[1]["loss"].dtype == "float64"
    train_on(corpus, cfg, tmp_path / "run")
    assert load_trained(tmp_path / "run").step == 12
  finally:
    jax.config.update("jax_enable_x64", False)
  losses, narrow = (
    [row["loss"] for row in numbers(tmp_path / name) if "loss" in row] for name in ("run", "narrow")
  )
  assert losses == pytest.approx(narrow, rel=1e-3) and losses != narrow


def test_without_64_bits(tmp_path):
  with pytest.raises(ValueError, match=r"'float64' needs jax's 64-bit types: set JAX_ENABLE_X64=1"):
    check_start(wide(), tmp_path / "run")
  assert not (tmp_path / "run").exists()
