"""Loss, accuracy and bits per byte on what a task holds out."""

import itertools
import math
from collections.abc import Iterator

from deltanet_jax.data import Task
from deltanet_jax.train.evaluated import Evaluated


class Validation:
  """An evaluator of the task's own validation batches, all or the first `batches`.

  Yields the loss per target, the share of targets that are the likeliest token and, where all of a
  text is read, bits per byte of it.
  """

  def __init__(self, task: Task, batches: int | None = None):
    self._task, self._batches = task, batches

  def __call__(self, evaluated: Evaluated) -> Iterator[tuple[str, float]]:
    held_out = self._task.validation(*evaluated.share)
    totals = evaluated.totals(itertools.islice(held_out, self._batches))
    if not totals["targets"]:
      return
    yield "validation_loss", totals["loss"] / totals["targets"]
    yield "validation_accuracy", totals["correct"] / totals["targets"]
    if self._batches is None and self._task.validation_bytes:
      yield "validation_bits_per_byte", totals["loss"] / math.log(2) / self._task.validation_bytes
