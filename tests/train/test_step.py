"""One update against a direct computation of loss, gradient and AdamW."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax import device_batches
from deltanet_jax.train.checkpoint import Checkpoints
from deltanet_jax.train.optim import learning_rate
from deltanet_jax.train.step import make_trainer
from tests.support.training import tiny


def random_batch():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 257, (8, 33)).astype(np.int32)
  ids = np.cumsum(rng.random((8, 32)) < 0.1, axis=1).astype(np.int32) + 1
  # Micro-batches have different numbers of targets.
  mask = rng.random((8, 32)) < np.linspace(0.2, 1, 8)[:, None]
  return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ids, mask=mask)


def update_once(cfg, state=None):
  trainer = make_trainer(cfg)
  state = trainer.lower_init().compile()(np.uint32(cfg.seed)) if state is None else state
  before = jax.device_get(state)
  batch = device_batches.to_devices(random_batch(), trainer.batch_shapes())
  update = trainer.lower_update().compile()
  after, metrics = update(state, batch, learning_rate(cfg, before["step"].item()))
  return trainer, before, jax.device_get(after), {name: x.item() for name, x in metrics.items()}


@pytest.fixture(scope="module")
def plain():
  return update_once(tiny())


def test_loss_gradient_and_adamw(plain):
  trainer, before, after, metrics = plain
  batch = {name: jnp.asarray(x) for name, x in random_batch().items()}

  def loss(weights):
    logits = trainer.abstract_model.model(weights)(batch["tokens"], batch["segment_ids"])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
    return -jnp.where(batch["mask"], chosen[..., 0], 0).sum() / batch["mask"].sum()

  expected, grads = jax.value_and_grad(loss)(before["weights"])
  norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))
  np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
  np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
  opt, rate = trainer.cfg.optimizer, learning_rate(trainer.cfg, 0)
  np.testing.assert_allclose(metrics["learning_rate"], rate)
  decays = trainer.abstract_model.decays
  for name, w in before["weights"].items():
    g = np.asarray(grads[name], np.float64) * min(1, opt.clip / norm)
    # In Adam's first step the moments are the gradient and its square.
    direction = g / (np.abs(g) + opt.eps) + opt.weight_decay * decays[name] * w
    clear = np.abs(g) > 1e-6  # elsewhere rounding decides the sign
    change = (after["weights"][name] - w)[clear]
    np.testing.assert_allclose(change, -rate * direction[clear], rtol=2e-2, atol=1e-7)


@pytest.mark.parametrize("changes", [dict(grad_accum=4), dict(loss_chunk=8)], ids=str)
def test_micro_batches_and_loss_chunks_do_not_change_the_update(plain, changes):
  _, _, expected, numbers = plain
  _, _, after, metrics = update_once(dataclasses.replace(tiny(), **changes))
  for name in ("loss", "grad_norm"):
    np.testing.assert_allclose(metrics[name], numbers[name], rtol=1e-6)
  moments = lambda state: np.concatenate([x.ravel() for x in jax.tree.leaves(state["optimizer"])])
  error = np.linalg.norm(moments(after) - moments(expected)) / np.linalg.norm(moments(expected))
  assert error <= 1e-5


def test_a_non_finite_gradient_skips_the_update(plain):
  _, before, _, _ = plain
  weights = before["weights"] | {
    "norm.scale": np.full_like(before["weights"]["norm.scale"], np.inf)
  }
  state = jax.device_put(before | {"weights": weights})
  _, before, after, metrics = update_once(tiny(), state)
  for part in ("weights", "optimizer"):
    jax.tree.map(np.testing.assert_array_equal, after[part], before[part])
  assert (metrics["skipped"], metrics["bad"], after["step"]) == (1, 1, 1)


def test_checkpoint_retention(plain, tmp_path):
  cfg = dataclasses.replace(tiny().checkpoint, keep=2, keep_every=4)
  checkpoints = Checkpoints(tmp_path, cfg)
  for step in (2, 4, 6, 8, 10, 12, 14):
    checkpoints.save(step, jax.device_put(plain[2]), {})
  checkpoints.wait()
  kept = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
  assert kept == [4, 8, 12, 14]
