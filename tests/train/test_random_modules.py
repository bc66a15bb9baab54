"""Mixers with modules that draw random numbers (`nnx.Dropout`): training and evaluation mode."""

import copy
import dataclasses
import pickle
import shutil
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax import build, load_trained
from deltanet_jax.config import settings
from deltanet_jax.mixers import MIXERS
from deltanet_jax.mixers.linear_attention import LinearAttention, LinearAttentionConfig
from deltanet_jax.models import count_parameters
from deltanet_jax.train.step import make_trainer
from tests.support.training import numbers, tiny, train_on


@settings
class DroppedConfig(LinearAttentionConfig):
  kind: ClassVar[str] = "dropped"


class Dropped(LinearAttention):
  """Linear attention with dropout of its output."""

  Config = DroppedConfig

  def __init__(self, cfg, width, *, rngs, **options):
    super().__init__(cfg, width, rngs=rngs, **options)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def mix(self, x, segment_ids, state):
    o, state = super().mix(x, segment_ids, state)
    return self.dropout(o), state


class Averaged(Dropped):
  """Has a variable that training cannot keep."""

  def __init__(self, cfg, width, *, rngs, **options):
    super().__init__(cfg, width, rngs=rngs, **options)
    self.mean = nnx.BatchStat(jnp.zeros(4))


@pytest.fixture
def cfg(monkeypatch):
  monkeypatch.setitem(MIXERS, "dropped", Dropped)
  cfg = tiny()
  mixers = {"a": DroppedConfig(heads=2)}
  return dataclasses.replace(
    cfg, model=dataclasses.replace(cfg.model, mixers=mixers, pattern=("a",))
  )


def gradients(trainer):
  """Return the loss and gradient of a fixed batch as a function of the step."""
  tokens = np.random.default_rng(0).integers(0, 257, (8, 33)).astype(np.int32)
  ones = np.ones((8, 32), np.int32)
  batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ones, mask=ones > 0)
  weights = trainer.init(0)["weights"]
  compiled = jax.jit(trainer.loss_and_gradient)
  return lambda step: compiled(weights, batch, step)


def test_modes_of_a_model(cfg):
  model, tokens = build(cfg.model, 0), jnp.arange(8)[None]
  first, second = model(tokens), model(tokens)
  assert (first != second).any(), "in training mode, as NNX builds it, every call draws anew"
  model.eval()
  np.testing.assert_array_equal(model(tokens), model(tokens))
  for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
    np.testing.assert_array_equal(other(tokens), model(tokens))
  model.train()
  assert (model(tokens) != model(tokens)).any()
  assert count_parameters(cfg.model) == sum(
    x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))
  )


def test_training_draws_by_seed_and_step(cfg):
  run = gradients(make_trainer(cfg))
  loss, grads = run(3)
  again, same = run(3)
  assert loss == again != run(4)[0]
  jax.tree.map(np.testing.assert_array_equal, grads, same)
  other = gradients(make_trainer(dataclasses.replace(cfg, seed=1, grad_accum=2)))(3)[0]
  assert np.isfinite(other) and loss != other


def test_layers_draw_independently(cfg):
  trainer = make_trainer(cfg)
  model = trainer.abstract_model.model(trainer.init(0)["weights"], jax.random.key(0))
  keys = jax.tree.leaves(nnx.state(model, nnx.RngKey))
  data = np.concatenate([jax.random.key_data(x).reshape(-1, 2) for x in keys])
  assert len(data) == cfg.model.depth == len(np.unique(data, axis=0))


def test_remat_draws_the_same(cfg):
  other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, remat="full"))
  loss, grads = gradients(make_trainer(cfg))(2)
  again, same = gradients(make_trainer(other))(2)
  np.testing.assert_allclose(again, loss, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, same)


def test_run_resumes_and_evaluates_without_dropout(cfg, corpus, tmp_path):
  train_on(corpus, cfg, tmp_path)
  expected = numbers(tmp_path)
  shutil.rmtree(tmp_path / "checkpoints/12")
  train_on(corpus, cfg, tmp_path)
  assert numbers(tmp_path) == expected
  model, tokens = load_trained(tmp_path).model, jnp.arange(8)[None]
  np.testing.assert_array_equal(model(tokens), model(tokens))
  state = model.init_state(1, 8)
  np.testing.assert_allclose(model.prefill(tokens, state)[0], model(tokens), atol=1e-5)


def test_other_variables_are_refused(cfg, monkeypatch):
  monkeypatch.setitem(MIXERS, "dropped", Averaged)
  with pytest.raises(ValueError, match=r"is an nnx[.]BatchStat, which training would not keep"):
    make_trainer(cfg)
