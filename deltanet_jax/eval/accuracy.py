"""Accuracy of argmax predictions, by the conventions of the synthetic benchmarks."""

from collections.abc import Iterator, Mapping

import numpy as np

from deltanet_jax.data import Batch, ValidationSource
from deltanet_jax.eval.evaluation import EvalContext


def macro_accuracy(targets: np.ndarray, predicted: np.ndarray) -> float:
  """Return the mean, over token ids, of the recall of that id.

  The mean is over all ids among the targets or the predictions; an id that is predicted but never
  a target counts as 0.
  """
  size = int(max(targets.max(), predicted.max())) + 1
  count = lambda x: np.bincount(x, minlength=size)
  total, correct = count(targets), count(targets[targets == predicted])
  present = (total > 0) | (count(predicted) > 0)
  return float(np.mean(correct[present] / np.maximum(total[present], 1)))


def accepted(batch: Batch, predicted: np.ndarray) -> np.ndarray:
  """Return `[B L]`: whether the automaton of `RegBench` accepts the predicted token."""
  return (batch["accepted"].astype(np.int64) >> np.minimum(predicted, 62)) & 1 == 1


class Accuracy:
  """Evaluator of argmax accuracy on a validation or test split.

  Yields `validation_accuracy`, the fraction of scored targets predicted correctly, and
  `validation_macro_accuracy`, the mean over batches of `macro_accuracy`, as in the MAD benchmark.
  Unlike `Validation` it computes no loss, and logits only at scored targets.

  Args:
    name: replaces "validation" in the names.
  """

  def __init__(self, source: ValidationSource, name: str = "validation"):
    self._source, self._name = source, name

  def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
    correct, macro = [], []
    for batch, ids in context.predict(self._source.validation(0, 1)):
      targets, predicted = batch["targets"][batch["mask"]], ids[batch["mask"]]
      correct.append(targets == predicted)
      macro.append(macro_accuracy(targets, predicted))
    yield f"{self._name}_accuracy", float(np.mean(np.concatenate(correct)))
    yield f"{self._name}_macro_accuracy", float(np.mean(macro))


class DfaAccuracy:
  """Evaluator of `RegBench`: how often the sequence's automaton accepts the predicted token.

  Yields `validation_dfa_accuracy`, the mean over batches, as in that benchmark. Any accepted token
  is correct, not only the sampled one.
  """

  def __init__(self, source: ValidationSource, name: str = "validation"):
    self._source, self._name = source, name

  def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
    predictions = context.predict(self._source.validation(0, 1))
    rates = [np.mean(accepted(batch, ids)[batch["mask"]]) for batch, ids in predictions]
    yield f"{self._name}_dfa_accuracy", float(np.mean(rates))


class AccuracyByLength:
  """Evaluator of argmax accuracy at several sequence lengths, each with a task of its own.

  Yields `accuracy_all_64` over all positions of sequences of 64 tokens and `accuracy_last_64` at
  their last position. The batch size is that of training.
  """

  def __init__(self, tasks: Mapping[int, ValidationSource]):
    self._tasks = tasks

  def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
    for length, task in self._tasks.items():
      at = context.at(length=length)
      is_last = np.arange(length)[None] == length - 1
      everywhere = at.totals(task.validation(*at.share))
      last = at.totals(x | dict(mask=x["mask"] & is_last) for x in task.validation(*at.share))
      yield f"accuracy_all_{length}", everywhere["correct"] / everywhere["targets"]
      yield f"accuracy_last_{length}", last["correct"] / last["targets"]
