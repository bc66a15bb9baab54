"""Evaluators on a model outside its run, by the programs of a run."""

from collections.abc import Sequence

import jax

from deltanet_jax.config import TrainConfig
from deltanet_jax.models import LM
from deltanet_jax.models.abstract import put_on_mesh, weights_of
from deltanet_jax.train.eval_context import EvalContext, Evaluator, Scorer
from deltanet_jax.train.step import make_trainer


def evaluate(
  model: LM, cfg: TrainConfig, evaluators: Sequence[Evaluator], step: int = 0
) -> dict[str, float]:
  """What evaluators say of a model; with a run's own `cfg` bit for bit what they said in it.

  Args:
    cfg: its model is that of `model`; mesh, data.batch, data.length and loss_chunk say how batches
      are computed, the rest is not asked.
  """
  trainer = make_trainer(cfg)
  weights = put_on_mesh(jax.device_get(weights_of(model)), trainer.state_shapes()["weights"])
  evaluated = EvalContext(Scorer(trainer), weights, step)
  return {name: number for evaluator in evaluators for name, number in evaluator(evaluated)}
