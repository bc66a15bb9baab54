"""Accuracy evaluators of the synthetic benchmarks against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.config import DataConfig
from deltanet_jax.data import RegBench, ValidationSource
from deltanet_jax.eval import Accuracy, DfaAccuracy, evaluate
from deltanet_jax.eval.accuracy import accepted, macro_accuracy
from deltanet_jax.models import build, preset
from tests.support.training import tiny


def test_macro_accuracy_is_the_mean_over_token_ids():
  targets, predicted = np.array([3, 3, 3, 3, 5, 5]), np.array([3, 3, 3, 7, 5, 1])
  # 3: three of four, 5: one of two; 7 and 1 are predicted but never targets.
  assert macro_accuracy(targets, predicted) == (3 / 4 + 1 / 2 + 0 + 0) / 4
  assert macro_accuracy(targets, targets) == 1


def test_a_token_is_correct_if_the_automaton_accepts_it():
  batch = dict(accepted=np.array([[0b0110, 0b0110, 0b0110, 0]], np.int32))
  correct = accepted(batch, np.array([[1, 2, 3, 200]]))
  assert correct.tolist() == [[True, True, False, False]]


class Sparse(ValidationSource):
  """A task's batches with some targets masked, among them all of one sequence."""

  def __init__(self, task):
    self._task = task

  def validation(self, host, hosts):
    for batch in self._task.validation(host, hosts):
      some = np.random.default_rng(0).random(batch["mask"].shape) < 0.5
      some[2] = False
      yield batch | dict(mask=batch["mask"] & some)


def test_evaluators_match_direct_argmax():
  few = dict(alphabet=5, letters=(4, 5), strings=(3, 4), string_length=(1, 8), test_examples=12)
  task = RegBench(batch=8, examples=None, **few)
  cfg = tiny(model=preset("deltanet-tiny", vocab=7, depth=1, width=32, mlp_multiple=32))
  cfg.data, cfg.loss_chunk = DataConfig(length=task.shape[1], batch=8), 17  # of 34
  model = build(cfg.model)
  model.embedding[...] *= 40  # so that predictions differ
  sets = dict(test=task.test, some=Sparse(task.test))
  kinds = (Accuracy, DfaAccuracy)
  results = evaluate(
    model, cfg, [kind(held, name) for name, held in sets.items() for kind in kinds]
  )
  logits = jax.jit(lambda tokens: model(tokens))
  for name, held_out in sets.items():
    right, macro, dfa = [], [], []
    for batch in held_out.validation(0, 1):
      at = batch["mask"]
      ids = np.asarray(jnp.argmax(logits(batch["tokens"]), axis=-1))
      right.extend(ids[at] == batch["targets"][at])
      macro.append(macro_accuracy(batch["targets"][at], ids[at]))
      dfa.append(np.mean([a >> i & 1 for a, i in zip(batch["accepted"][at], ids[at])]))
    assert len(set(ids[at])) > 2 and 0 < np.mean(right) < np.mean(dfa) < 1
    assert results[f"{name}_accuracy"] == pytest.approx(np.mean(right))
    assert results[f"{name}_macro_accuracy"] == pytest.approx(np.mean(macro))
    assert results[f"{name}_dfa_accuracy"] == pytest.approx(np.mean(dfa))
