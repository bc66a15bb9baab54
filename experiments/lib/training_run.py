"""One training run as a value: its config, task and evaluators."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator

import numpy as np

from deltanet_jax.config import TrainConfig, to_json
from deltanet_jax.data import Batch, Task
from deltanet_jax.models import summarize
from deltanet_jax.train import EvalContext, Evaluator


@dataclasses.dataclass(frozen=True)
class TrainingRun:
  """Config, task and evaluators of one training run."""

  config: TrainConfig
  task: Task
  evaluators: list[Evaluator]

  def settings_hash(self) -> str:
    """A short hash of the config and of the task's identity."""
    text = json.dumps([to_json(self.config), self.task.identity()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

  def flops(self) -> float:
    """FLOP of all updates; a backward pass counts as two forward passes."""
    cfg = self.config
    tokens = cfg.steps * cfg.data.batch * cfg.data.length
    return 3 * tokens * _summary(cfg.model, cfg.data.length).flops

  def parameters(self) -> int:
    return _summary(self.config.model, self.config.data.length).parameters

  def metric_names(self) -> list[str] | None:
    """Metrics that the evaluators report; None if one of them needs a model to list its own."""
    try:
      return [name for evaluator in self.evaluators for name, _ in evaluator(_NoModel())]
    except _ModelNeededError:
      return None


class _ModelNeededError(Exception):
  """An evaluator uses more of its context than `_NoModel` has."""


class _NoModel(EvalContext):
  """A context without a model: made-up losses and predictions, from one batch at most."""

  share, step = (0, 1), 0

  def __init__(self):
    pass

  def totals(self, batches: Iterable[Batch]) -> dict[str, float]:
    del batches
    return dict(loss=1.0, correct=1, targets=1)

  def predict(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
    return ((batch, batch["targets"]) for batch in itertools.islice(batches, 1))

  @property
  def model(self):
    raise _ModelNeededError

  scorer = weights = model


# A sweep asks for the same few models many times.
_summary = functools.cache(summarize)
