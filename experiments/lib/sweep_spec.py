"""Tables of trainings: a row is a model on a task, with a grid of settings and seeds.

A file of experiments/configs has them as `ROWS`; `python -m experiments.sweep` trains them. The
grid is trained with the first seed, and the other seeds with the point of it that was best.
"""

import dataclasses
import fnmatch
import functools
import hashlib
import importlib
import json
import pathlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Literal

from deltanet_jax.config import TrainConfig, nearest, to_json
from deltanet_jax.data import Task
from deltanet_jax.models import summarize
from deltanet_jax.train import Evaluator

Point = dict[str, float]  # of a grid: settings by name
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


@dataclasses.dataclass(frozen=True)
class Training:
  """What one run needs."""

  config: TrainConfig
  task: Task
  evaluators: list[Evaluator]

  def settings(self) -> str:
    """A short hash of everything that is set."""
    told = json.dumps([to_json(self.config), self.task.identity()], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]

  def flops(self) -> float:
    """Of all updates, a backward costing twice the forward."""
    cfg = self.config
    tokens = cfg.steps * cfg.data.batch * cfg.data.length
    return 3 * tokens * _summary(cfg.model, cfg.data.length).flops

  def parameters(self) -> int:
    return _summary(self.config.model, self.config.data.length).parameters


# Tables ask for the same model at many places.
_summary = functools.cache(summarize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A model on one setting of a task.

  Attributes:
    set: which rows it belongs to, "paper" or "small".
    key: what tells it from the others of its set.
    make: from a point of the grid and a seed to what is trained.
    metric: the evaluated number that points of the grid are compared by.
    lower: whether less of it is better.
    enough: from which on more of it is no better, where training ends: of points that reach it the
      first is taken, as more would be chance, and those after it are not trained.
    evaluation: the one of a run that counts: its last, or its best by the metric.
  """

  set: str
  key: dict[str, Any]
  make: Callable[[Point, int], Training]
  grid: tuple[Point, ...] = ({},)
  seeds: tuple[int, ...] = (0,)
  metric: str
  lower: bool = False
  enough: float = float("inf")
  evaluation: Literal["last", "best"] = "last"

  @property
  def name(self) -> str:
    return f"{self.set}/{'-'.join(str(x) for x in self.key.values())}"

  @property
  def runs(self) -> int:
    return len(self.grid) + len(self.seeds) - 1

  def run_key(self, point: Point, seed: int) -> dict:
    """The key under which a run is kept."""
    return dict(set=self.set, **self.key, **point, seed=seed)

  def settled(self, metrics: dict | None) -> bool:
    """Whether a run with these metrics has reached enough: no later point of the grid counts."""
    return metrics is not None and metrics["evaluation"][self.metric] >= self.enough

  def best(self, evaluations: list[dict[str, float]]) -> int:
    """Which of them is best by the metric; the first of equal ones. NaN is worst."""
    values = [x[self.metric] for x in evaluations]
    worth = [-x if self.lower else min(x, self.enough) for x in values]
    return max(range(len(worth)), key=lambda i: worth[i] if worth[i] == worth[i] else -float("inf"))


def tables() -> list[str]:
  """Names of the files with rows."""
  return sorted(path.stem for path in CONFIGS.glob("*.py") if "\nROWS" in path.read_text())


def load(name: str) -> list[Row]:
  """All rows of experiments/configs/<name>.py."""
  if name not in tables():
    raise ValueError(f"--config is {name!r}{nearest(name, tables())}, expected one of {tables()}.")
  rows = importlib.import_module(f"experiments.configs.{name}").ROWS
  names = [row.name for row in rows]
  assert len(set(names)) == len(names), "two rows have one name"
  return rows


def select(rows: list[Row], patterns: list[str]) -> list[Row]:
  """Rows of these sets, names, or patterns of names, in their own order."""
  chosen = []
  for pattern in patterns:
    found = [x for x in rows if pattern == x.set or fnmatch.fnmatchcase(x.name, pattern)]
    if not found:
      known = sorted({row.set for row in rows})
      names = [row.name for row in rows]
      raise ValueError(
        f"--rows={pattern} is no row{nearest(pattern, names)}, expected a set, one of {known}, or a"
        " name or pattern of those that --list shows."
      )
    chosen += found
  return [row for row in rows if row in chosen]


def metrics(row: Row, training: Training, workdir: pathlib.Path, last: dict) -> dict:
  """What is kept of a run that has ended, from its folder and its last evaluation."""
  logged = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  evaluated = [x for x in logged if row.metric in x]
  chosen = evaluated[row.best(evaluated)] if row.evaluation == "best" else evaluated[-1]
  speeds = [x["tokens_per_second"] for x in logged if "tokens_per_second" in x]
  losses = [x["loss"] for x in logged if "loss" in x]
  return dict(
    evaluation={name: chosen[name] for name in last},
    step=chosen["step"],
    updates=evaluated[-1]["step"],
    of=training.config.steps,
    parameters=training.parameters(),
    training_loss=losses[-1] if losses else None,
    tokens_per_second=round(statistics.median(speeds)) if speeds else None,
    curve=[[x["step"], round(x[row.metric], 4)] for x in thin(evaluated)],
  )


def thin(values: list, most: int = 20) -> Iterator:
  """At most so many of them, evenly, the last among them."""
  every = -(-len(values) // most)
  return iter(values[(len(values) - 1) % every :: every])
