"""Features of benchmark recipes: scored targets, dropout, weight decay of all, early stopping."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from deltanet_jax import device_batches
from deltanet_jax.data import StateTracking
from deltanet_jax.eval import Validation
from deltanet_jax.models import preset
from deltanet_jax.models.abstract import weights_of
from deltanet_jax.models.stack import Stack
from deltanet_jax.train import PreemptionError, loop
from deltanet_jax.train.optim import learning_rate
from deltanet_jax.train.step import make_trainer
from tests.support.models import random_model
from tests.support.training import numbers, silent, tiny


def random_batch(scored=5):
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 257, (8, 33)).astype(np.int32)
  # Sequences have 0 to `scored` scored targets, at random positions.
  order = rng.permuted(np.tile(np.arange(32), (8, 1)), axis=1)
  mask = order < np.minimum(np.arange(8), scored)[:, None]
  ids = np.ones((8, 32), np.int32)
  return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ids, mask=mask)


def gradients(cfg, steps=(0,)):
  """Return loss and gradients of one batch at these steps, and its evaluation totals."""
  trainer, weights = make_trainer(cfg), weights_of(random_model(cfg.model))

  @jax.jit
  def run(batch, steps):
    return lax.map(lambda step: trainer.loss_and_gradient(weights, batch, step), steps)

  batch = device_batches.to_devices(random_batch(), trainer.batch_shapes(), cfg.data.scored)
  totals = trainer.evaluation.totals(weights, [random_batch()])
  return jax.device_get(run(batch, jnp.asarray(steps))), totals


def small(**changes):
  """Return the config of a model that compiles quickly."""
  cfg = tiny()
  size = dict(vocab=260, width=32, depth=1, mlp_ratio=0.0)
  cfg.model = preset("transformer-tiny", **size | changes)
  return cfg


@pytest.mark.parametrize("scored", [5, 20])  # less than a chunk of the loss, and two of them
def test_logits_only_at_scored_targets_give_the_same_loss_and_gradients(scored):
  cfg = small()
  cfg.loss_chunk = 8
  (want, grads), score = gradients(cfg)
  cfg.data.scored = scored
  (loss, found), same_score = gradients(cfg)
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  for name, x in grads.items():
    np.testing.assert_allclose(found[name], x, atol=1e-6 * np.abs(x).max() + 1e-9)
  assert {x: score[x] for x in ("correct", "targets")} == {
    x: same_score[x] for x in ("correct", "targets")
  }


def test_more_scored_targets_than_declared_raise():
  cfg = small()
  cfg.data.scored = 4
  with pytest.raises(ValueError, match=r"a sequence has 5 scored targets, but data\.scored is 4"):
    gradients(cfg)


def test_dropout_depends_only_on_seed_and_step():
  cfg = small(embedding_dropout=0.5)
  (loss, grads), score = gradients(cfg, (0, 1, 0))
  assert loss[0] == loss[2] and abs(loss[0] - loss[1]) > 1e-4
  (again, same), _ = gradients(dataclasses.replace(cfg, grad_accum=2), (0, 1, 0))
  np.testing.assert_allclose(again, loss, rtol=1e-6)
  np.testing.assert_allclose(same["embedding"], grads["embedding"], atol=1e-6)
  # Evaluation has no dropout.
  cfg.model.embedding_dropout = 0.0
  _, expected = gradients(cfg)
  np.testing.assert_allclose(score["loss"], expected["loss"], rtol=1e-6)


def test_dropout_zeroes_half_and_scales_the_rest(monkeypatch):
  cfg, seen = small(embedding_dropout=0.5), []
  look = lambda _, x, *others: (seen.append(x), (x, None))[1]
  monkeypatch.setattr(Stack, "__call__", look)
  model, tokens = random_model(cfg.model), jnp.asarray(random_batch()["tokens"])
  for keys in (None, make_trainer(cfg).dropout_keys(0)):
    with jax.disable_jit():
      model.features(tokens, dropout=keys)
  full, dropped = map(np.asarray, seen)
  kept = dropped != 0
  assert 0.45 < kept.mean() < 0.55 and not (kept[0] == kept[1]).all()
  np.testing.assert_allclose(dropped[kept], 2 * full[kept])


def test_weight_decay_of_all_weights_without_clipping():
  cfg = small()
  opt = cfg.optimizer
  opt.weight_decay, opt.decay_all, opt.clip = 0.1, True, None
  trainer = make_trainer(cfg)
  weights = {name: np.full(x.shape, 2.0) for name, x in trainer.abstract_model.shapes.items()}
  grads = {name: np.full(x.shape, 50.0) for name, x in weights.items()}
  directions, _ = trainer.optimizer.update(grads, trainer.optimizer.init(weights), weights)
  for name, d in directions.items():
    np.testing.assert_allclose(d, 1 + 0.1 * 2.0, rtol=1e-6, err_msg=name)


def test_stepwise_and_constant_learning_rate():
  cfg = tiny()
  opt = cfg.optimizer
  opt.warmup_tokens, opt.final_learning_rate, opt.rate_every = 0, 0.0, 4
  rates = [float(learning_rate(cfg, step)) for step in range(12)]
  want = [1e-2 * (1 + np.cos(np.pi * epoch / 3)) / 2 for epoch in range(3)]
  np.testing.assert_allclose(rates, np.repeat(want, 4), rtol=1e-6)
  opt.final_learning_rate = opt.learning_rate
  np.testing.assert_allclose([learning_rate(cfg, step) for step in (0, 5, 11)], 1e-2, rtol=1e-6)


@pytest.fixture
def stopped(monkeypatch):
  """Stop the run after update 4, once."""
  asked, signals = loop.Stop.asked, iter([True])
  monkeypatch.setattr(
    loop.Stop, "asked", lambda self, step: (step == 4 and next(signals, False)) or asked(self, step)
  )


def test_early_stopping(tmp_path, stopped):
  cfg = small()
  cfg.eval_every, cfg.stop_metric = 2, "steps"
  task = StateTracking("parity", length=32, batch=8, validation_batches=1)
  count = lambda context: [("steps", float(context.step))]

  def run(above, name="run", **changes):
    now = dataclasses.replace(cfg, stop_above=above, **changes)
    return silent(now, tmp_path / name, task, evaluators=[Validation(task), count])

  # Preempted at a step that is due for evaluation, it evaluates when it resumes.
  with pytest.raises(PreemptionError, match="after step 4"):
    run(5.0)
  results = run(5.0)
  assert results["steps"] == 6
  # Another start changes nothing.
  assert run(5.0) == results
  steps = [row["step"] for row in numbers(tmp_path / "run")]
  assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]
  evaluated = [json.dumps(row) for row in numbers(tmp_path / "run") if "steps" in row]
  assert len(evaluated) == 3
  with pytest.raises(ValueError, match="stop_metric is 'step', but the evaluators give"):
    run(5.0, "other", stop_metric="step")
