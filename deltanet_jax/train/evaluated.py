"""A model in training, as evaluators see it."""

import dataclasses
from collections.abc import Callable, Iterable

from deltanet_jax.data import Batch
from deltanet_jax.models import LM
from deltanet_jax.train import feed
from deltanet_jax.train.step import Trainer


class Scorer:
  """Sums of losses over batches on the mesh of a trainer; compiled when first asked."""

  def __init__(self, trainer: Trainer):
    self.trainer = trainer
    self._program = None

  def totals(self, weights: dict, batches: Iterable[Batch]) -> dict[str, float]:
    shapes = self.trainer.batch_shapes()
    sums = dict(loss=0.0, correct=0, targets=0)
    for batch in batches:
      self._program = self._program or self.trainer.lower_score().compile()
      found = self._program(weights, feed.place(batch, shapes))
      sums = {name: total + found[name].item() for name, total in sums.items()}
    return sums


@dataclasses.dataclass(frozen=True)
class Evaluated:
  """A model after `step` updates; `host` of `hosts` is the share of rows that is read here."""

  scorer: Scorer
  weights: dict
  step: int

  @property
  def model(self) -> LM:
    return self.scorer.trainer.skeleton.model(self.weights)

  @property
  def share(self) -> tuple[int, int]:
    """(host, hosts): which rows of a batch this process gives to `totals`."""
    return feed.host_share(self.scorer.trainer.batch_shapes()["tokens"])

  def totals(self, batches: Iterable[Batch]) -> dict[str, float]:
    """Over all targets of these batches: sum of the loss, how many were right, how many."""
    return self.scorer.totals(self.weights, batches)


# Yields names and numbers; called by every process.
Evaluator = Callable[[Evaluated], Iterable[tuple[str, float]]]
