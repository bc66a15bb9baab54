"""Loss, accuracy and bits per byte on the validation split of a task."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from deltanet_jax.data import Batch, ValidationSource
from deltanet_jax.eval.evaluation import EvalContext


class Validation:
  """Evaluator of a validation split.

  Yields `validation_loss` per target (nats), `validation_accuracy` (argmax) and, if all batches of
  a text are read, `validation_bits_per_byte`.
  """

  def __init__(
    self,
    source: ValidationSource,
    batches: int | None = None,
    progress: Callable[[Iterable[Batch]], Iterator[Batch]] = iter,
  ):
    """Initialize.

    Args:
      batches: number of batches to read; None: all.
      progress: wraps the batches, for example with a progress bar.
    """
    self._source, self._batches, self._progress = source, batches, progress

  def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
    batches = itertools.islice(self._source.validation(*context.share), self._batches)
    totals = context.totals(self._progress(batches))
    if not totals["targets"]:
      return
    yield "validation_loss", totals["loss"] / totals["targets"]
    yield "validation_accuracy", totals["correct"] / totals["targets"]
    if self._batches is None and self._source.validation_bytes:
      yield "validation_bits_per_byte", totals["loss"] / math.log(2) / self._source.validation_bytes
