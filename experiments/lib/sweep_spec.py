"""Sweeps as tables: a row is a model on a task, with a grid of hyperparameters and seeds.

A config file defines them as `ROWS`; `python -m experiments.sweep` trains them. The full grid is
trained with the first seed, the other seeds only with the best point of the grid.
"""

import dataclasses
import fnmatch
import json
import pathlib
import statistics
from collections.abc import Callable, Collection
from typing import Any, Literal

from deltanet_jax.config import nearest
from experiments.lib import config_modules
from experiments.lib.training_run import TrainingRun

Point = dict[str, float]  # one point of a grid: hyperparameters by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A model on one setting of a task.

  Attributes:
    set: the group of rows it belongs to, "paper" or "small".
    key: distinguishes it from the other rows of its set.
    make: creates the training run of a grid point and a seed.
    metric: metric that grid points are compared by; every evaluation must report it.
    lower: whether lower values of it are better.
    enough: value of the metric at which training stops. Differences above it are noise: of the
      points that reach it the first is the best, and later ones are not trained.
    evaluation: which evaluation of a run is recorded: the last, or the best by the metric.
  """

  set: str
  key: dict[str, Any]
  make: Callable[[Point, int], TrainingRun]
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
    """Number of runs, unless a point reaches `enough` early."""
    return len(self.grid) + len(self.seeds) - 1

  def run_key(self, point: Point, seed: int) -> dict:
    """Key of the record of one run."""
    return dict(set=self.set, **self.key, **point, seed=seed)

  def is_enough(self, metrics: dict | None) -> bool:
    """Whether a run with these metrics reached `enough`, so that later points are skipped."""
    return metrics is not None and metrics["evaluation"][self.metric] >= self.enough

  def check_metric(self, known: Collection[str] | None):
    """ValueError unless the metric of the row is one that its evaluators report, if `known`."""
    if known is not None and self.metric not in known:
      raise ValueError(
        f"row {self.name} has the metric {self.metric!r}{nearest(self.metric, known)}, but its"
        f" evaluators report only {', '.join(known)}: correct the row."
      )

  def best(self, evaluations: list[dict[str, float]]) -> int:
    """Index of the best evaluation by the metric; the first of equal ones. NaN is worst."""
    values = [x[self.metric] for x in evaluations]
    scores = [-x if self.lower else min(x, self.enough) for x in values]
    return max(
      range(len(scores)), key=lambda i: -float("inf") if scores[i] != scores[i] else scores[i]
    )


@dataclasses.dataclass(frozen=True)
class Table:
  """The rows of a config file.

  Attributes:
    name: records are stored under it.
    builtin: whether the file is in experiments/configs.
  """

  name: str
  rows: list[Row]
  builtin: bool = True


def load(value: str) -> Table:
  """Import the table that `--config` names: a name in experiments/configs, or a path.

  Raises:
    ValueError: there is no such file, or it defines no ROWS.
  """
  path = config_modules.find(value)
  rows = getattr(config_modules.load(path), "ROWS", None)
  if rows is None:
    tables = config_modules.names_with("ROWS")
    raise ValueError(f"{path} defines no ROWS; sweeps in experiments/configs: {', '.join(tables)}.")
  if not config_modules.is_builtin(path) and (config_modules.FOLDER / path.name).exists():
    raise ValueError(
      f"{path} has the name of a file in experiments/configs, and its records would replace that"
      " one's: rename it."
    )
  names = [row.name for row in rows]
  if twice := sorted({name for name in names if names.count(name) > 1}):
    raise ValueError(f"{path} has several rows named {twice[0]!r}: make their keys distinct.")
  return Table(path.stem, rows, config_modules.is_builtin(path))


def select(rows: list[Row], patterns: list[str]) -> list[Row]:
  """Rows that match any of the patterns (a set, a name, or a glob of names), in table order."""
  chosen = []
  for pattern in patterns:
    named = lambda x: pattern in (x.set, x.name)
    found = [x for x in rows if named(x) or fnmatch.fnmatchcase(x.name, pattern)]
    if not found:
      sets = ", ".join(sorted({row.set for row in rows}))
      names = [row.name for row in rows]
      raise ValueError(
        f"--rows={pattern} matches no row{nearest(pattern, names)}; expected a set ({sets}), or a"
        " name or pattern of the rows that --list shows."
      )
    chosen += found
  return [row for row in rows if row in chosen]


def summarize_run(
  row: Row, training_run: TrainingRun, workdir: pathlib.Path, last: dict[str, float]
) -> dict:
  """Metrics to record of a completed run.

  Args:
    workdir: its metrics.jsonl has all evaluations.
    last: the last evaluation.
  """
  row.check_metric(last)
  logged = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  evaluations = [x for x in logged if row.metric in x]
  chosen = evaluations[row.best(evaluations)] if row.evaluation == "best" else evaluations[-1]
  speeds = [x["tokens_per_second"] for x in logged if "tokens_per_second" in x]
  losses = [x["loss"] for x in logged if "loss" in x]
  return dict(
    evaluation={name: chosen[name] for name in last},
    step=chosen["step"],
    updates=evaluations[-1]["step"],
    of=training_run.config.steps,
    parameters=training_run.parameters(),
    training_loss=losses[-1] if losses else None,
    tokens_per_second=round(statistics.median(speeds)) if speeds else None,
    curve=[[x["step"], round(x[row.metric], 4)] for x in subsample(evaluations)],
  )


def subsample(values: list, limit: int = 20) -> list:
  """At most `limit` of the values, evenly spaced, including the last."""
  every = -(-len(values) // limit)
  return values[(len(values) - 1) % every :: every]
