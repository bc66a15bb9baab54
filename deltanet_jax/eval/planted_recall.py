"""In-context recall: how much better a model predicts values that were planted in its context."""

import math
from collections.abc import Iterator

from deltanet_jax.data import ValidationSource
from deltanet_jax.eval.evaluation import EvalContext


class PlantedRecall:
  """Evaluator of values planted in a context, compared with contexts that plant other values.

  Yields `recall_accuracy`, the fraction of value tokens predicted correctly (argmax),
  `recall_bits`, the bits per value token, and `recall_gain`, how many bits fewer that is than
  without the planted values: 0 for a model without recall.

  Args:
    planted: sequences in which the values occur earlier in the context.
    control: the same sequences with other values planted.
  """

  def __init__(self, planted: ValidationSource, control: ValidationSource):
    self._planted, self._control = planted, control

  def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
    planted = context.totals(self._planted.validation(*context.share))
    control = context.totals(self._control.validation(*context.share))
    bits, control_bits = (x["loss"] / x["targets"] / math.log(2) for x in (planted, control))
    yield "recall_accuracy", planted["correct"] / planted["targets"]
    yield "recall_bits", bits
    yield "recall_gain", control_bits - bits
