"""Tasks and evaluators of the user's that flags or a run name."""

from collections.abc import Sequence

from deltanet_jax import plugins
from deltanet_jax.config import TrainConfig
from deltanet_jax.data import Task
from deltanet_jax.train import Evaluator


def open_task(name: str, cfg: TrainConfig) -> Task:
  """Create the task that `--task` names: a function, or a class, that is called with the config.

  Raises:
    ValueError: there is no such function, or it returns no Task.
  """
  make = plugins.find("tasks", name)
  if not callable(make):
    raise ValueError(
      f"the task {name} is {type(make).__name__}, expected a function of the config."
    )
  task = make(cfg)
  if not isinstance(task, Task):
    raise ValueError(
      f"the task {name} returned {type(task).__name__}, expected a deltanet_jax.data.Task."
    )
  return task


def open_evaluators(names: Sequence[str]) -> list[Evaluator]:
  """Import the evaluators that `--evaluator` names; ValueError if one is not a function."""
  found = [plugins.find("evaluators", name) for name in names]
  for name, evaluator in zip(names, found):
    if not callable(evaluator):
      kind = type(evaluator).__name__
      raise ValueError(f"the evaluator {name} is {kind}, expected a function of an EvalContext.")
  return found
