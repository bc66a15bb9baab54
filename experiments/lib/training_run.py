"""One training run as a value: its config, task and evaluators."""

import dataclasses
import functools
import hashlib
import json

from deltanet_jax.config import TrainConfig, to_json
from deltanet_jax.data import Task
from deltanet_jax.models import summarize
from deltanet_jax.train import Evaluator


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


# A sweep asks for the same few models many times.
_summary = functools.cache(summarize)
