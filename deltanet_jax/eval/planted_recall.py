"""PlantedRecall from the context: how much better a model knows what it was told."""

import math
from collections.abc import Iterator

from deltanet_jax.data import ValidationSource
from deltanet_jax.train.eval_context import EvalContext


class PlantedRecall:
  """An evaluator of rows in which values were told, beside the same rows with others told.

  Yields `recall_accuracy`, the share of the values' tokens that are the predict one,
  `recall_bits`, bits per token of the values, and `recall_gain`, by how many bits that is less
  than where they were not told: 0 for a model that remembers nothing.
  """

  def __init__(self, told: ValidationSource, untold: ValidationSource):
    self._told, self._untold = told, untold

  def __call__(self, evaluated: EvalContext) -> Iterator[tuple[str, float]]:
    told = evaluated.totals(self._told.validation(*evaluated.share))
    untold = evaluated.totals(self._untold.validation(*evaluated.share))
    bits, without = (x["loss"] / x["targets"] / math.log(2) for x in (told, untold))
    yield "recall_accuracy", told["correct"] / told["targets"]
    yield "recall_bits", bits
    yield "recall_gain", without - bits
