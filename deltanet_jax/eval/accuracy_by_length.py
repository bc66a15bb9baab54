"""Accuracy on rows of other lengths than those of training."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from deltanet_jax.data import ValidationSource
from deltanet_jax.train.eval_context import EvalContext, Scorer
from deltanet_jax.train.step import make_trainer


class AccuracyByLength:
  """An evaluator of held-out rows, for every length those of a task of its own.

  Yields the share of targets whose argmax prediction is right: `accuracy_all_64` over all positions
  of rows of 64 tokens, `accuracy_last_64` at their last. Batches have as many rows as in training.
  """

  def __init__(self, tasks: Mapping[int, ValidationSource]):
    self._tasks = tasks
    self._scorers: dict[int, Scorer] = {}

  def _scorer(self, evaluated: EvalContext, length: int) -> Scorer:
    if length not in self._scorers:
      trainer = evaluated.scorer.trainer
      data = dataclasses.replace(trainer.cfg.data, length=length)
      cfg = dataclasses.replace(trainer.cfg, data=data, loss_chunk=length)
      cfg.tokens = max(cfg.tokens, data.batch * length)
      self._scorers[length] = Scorer(make_trainer(cfg, list(trainer.mesh.devices.flat)))
    return self._scorers[length]

  def __call__(self, evaluated: EvalContext) -> Iterator[tuple[str, float]]:
    for length, task in self._tasks.items():
      at = dataclasses.replace(evaluated, scorer=self._scorer(evaluated, length))
      at_end = np.arange(length)[None] == length - 1
      everything = at.totals(task.validation(*at.share))
      ends = at.totals(x | dict(mask=x["mask"] & at_end) for x in task.validation(*at.share))
      yield f"accuracy_all_{length}", everything["correct"] / everything["targets"]
      yield f"accuracy_last_{length}", ends["correct"] / ends["targets"]
