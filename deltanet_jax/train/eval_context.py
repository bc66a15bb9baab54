"""A model in training, as evaluators see it."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from deltanet_jax import device_batches
from deltanet_jax.data import Batch
from deltanet_jax.models import LM
from deltanet_jax.train.step import Trainer


class Scorer:
  """Losses and answers for batches on the mesh of a trainer; compiled when first asked."""

  def __init__(self, trainer: Trainer):
    self.trainer = trainer
    self._program = None
    self._likeliest = {}  # by how many targets of a row count

  def totals(self, weights: dict, batches: Iterable[Batch]) -> dict[str, float]:
    shapes = self.trainer.batch_shapes()
    sums = dict(loss=0.0, correct=0, targets=0)
    for batch in batches:
      self._program = self._program or self.trainer.lower_score().compile()
      found = self._program(
        weights, device_batches.to_devices(batch, shapes, self.trainer.cfg.data.scored)
      )
      sums = {name: total + found[name].item() for name, total in sums.items()}
    return sums

  def predict(self, weights: dict, batch: Batch) -> np.ndarray:
    """`[B L]` of a batch that every process has whole; of use where targets count."""
    shapes = self.trainer.batch_shapes()
    most = max(int(batch["mask"].sum(axis=1).max()), 1)
    counting = min(1 << (most - 1).bit_length(), batch["mask"].shape[1])  # few different programs
    if counting not in self._likeliest:
      self._likeliest[counting] = self.trainer.lower_predict(counting).compile()
    host, hosts = device_batches.host_share(shapes["tokens"])
    rows = len(batch["mask"]) // hosts
    own = {name: x[host * rows : (host + 1) * rows] for name, x in batch.items()}
    return np.asarray(self._likeliest[counting](weights, device_batches.to_devices(own, shapes)))


@dataclasses.dataclass(frozen=True)
class EvalContext:
  """A model after `step` updates; `host` of `hosts` is the share of rows that is read here."""

  scorer: Scorer
  weights: dict
  step: int

  @property
  def model(self) -> LM:
    return self.scorer.trainer.abstract_model.model(self.weights)

  @property
  def share(self) -> tuple[int, int]:
    """(host, hosts): which rows of a batch this process gives to `totals`."""
    return device_batches.host_share(self.scorer.trainer.batch_shapes()["tokens"])

  def totals(self, batches: Iterable[Batch]) -> dict[str, float]:
    """Over all targets of these batches: sum of the loss, how many were right, how many."""
    return self.scorer.totals(self.weights, batches)

  def predict(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
    """Each batch with the argmax predictions `[B L]` at its targets that count.

    Args:
      batches: of all hosts, `validation(0, 1)`: every process then knows what all have found.
    """
    return ((batch, self.scorer.predict(self.weights, batch)) for batch in batches)


# Yields names and numbers; called by every process.
Evaluator = Callable[[EvalContext], Iterable[tuple[str, float]]]
