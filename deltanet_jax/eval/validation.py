"""Loss, accuracy and bits per byte on what a task holds out."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from deltanet_jax.data import Batch, ValidationSource
from deltanet_jax.train.eval_context import EvalContext


class Validation:
  """An evaluator of a task's own validation batches, or others, all or the first `batches`.

  Yields the loss per target, the accuracy of the argmax prediction and, where all of a
  text is read, bits per byte of it. `progress` may wrap the batches, to show how far it is.
  """

  def __init__(
    self,
    task: ValidationSource,
    batches: int | None = None,
    progress: Callable[[Iterable[Batch]], Iterator[Batch]] = iter,
  ):
    self._task, self._batches, self._progress = task, batches, progress

  def __call__(self, evaluated: EvalContext) -> Iterator[tuple[str, float]]:
    held_out = self._task.validation(*evaluated.share)
    totals = evaluated.totals(self._progress(itertools.islice(held_out, self._batches)))
    if not totals["targets"]:
      return
    yield "validation_loss", totals["loss"] / totals["targets"]
    yield "validation_accuracy", totals["correct"] / totals["targets"]
    if self._batches is None and self._task.validation_bytes:
      yield "validation_bits_per_byte", totals["loss"] / math.log(2) / self._task.validation_bytes
