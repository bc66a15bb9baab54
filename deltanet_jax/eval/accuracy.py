"""How often the argmax prediction is right, by the rules of synthetic benchmarks."""

from collections.abc import Iterator

import numpy as np

from deltanet_jax.data import Batch, ValidationSource
from deltanet_jax.train.eval_context import EvalContext


def macro_accuracy(targets: np.ndarray, found: np.ndarray) -> float:
  """The mean over kinds of tokens, among targets or found, of the share of its targets found.

  A kind that is found and is no target counts as 0.
  """
  kinds = int(max(targets.max(), found.max())) + 1
  count = lambda x: np.bincount(x, minlength=kinds)
  there, right = count(targets), count(targets[targets == found])
  present = (there > 0) | (count(found) > 0)
  return float(np.mean(right[present] / np.maximum(there[present], 1)))


def accepted(batch: Batch, found: np.ndarray) -> np.ndarray:
  """`[b L]` where the automaton of `RegBench` goes on with the token that was found."""
  return (batch["accepted"].astype(np.int64) >> np.minimum(found, 62)) & 1 == 1


class Accuracy:
  """An evaluator of what a task holds out: a task's validation, or its `test`.

  Yields `validation_accuracy`, the share of all targets that count, and
  `validation_macro_accuracy`, the mean over batches of `macro_accuracy`, as the MAD benchmark has
  it. `name` stands for "validation". Unlike `Validation` it has no loss, and takes logits only at
  targets that count.
  """

  def __init__(self, held_out: ValidationSource, name: str = "validation"):
    self._held_out, self._name = held_out, name

  def __call__(self, evaluated: EvalContext) -> Iterator[tuple[str, float]]:
    right, macro = [], []
    for batch, ids in evaluated.predict(self._held_out.validation(0, 1)):
      targets, found = batch["targets"][batch["mask"]], ids[batch["mask"]]
      right.append(targets == found)
      macro.append(macro_accuracy(targets, found))
    yield f"{self._name}_accuracy", float(np.mean(np.concatenate(right)))
    yield f"{self._name}_macro_accuracy", float(np.mean(macro))


class DfaAccuracy:
  """An evaluator of `RegBench`: `validation_dfa_accuracy`, how often a letter is found that the
  row's automaton accepts, not only the one that was drawn; the mean over batches, as there.
  """

  def __init__(self, held_out: ValidationSource, name: str = "validation"):
    self._held_out, self._name = held_out, name

  def __call__(self, evaluated: EvalContext) -> Iterator[tuple[str, float]]:
    found = evaluated.predict(self._held_out.validation(0, 1))
    shares = [np.mean(accepted(batch, ids)[batch["mask"]]) for batch, ids in found]
    yield f"{self._name}_dfa_accuracy", float(np.mean(shares))
