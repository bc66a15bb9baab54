"""Train the missing runs of a sweep one after the other, and record each when it ends."""

import contextlib
import pathlib
import time

import jax

from deltanet_jax.files import LockedError, locked
from experiments.lib import provenance, sweep_spec, training
from experiments.lib.records import Records
from experiments.lib.sweep_spec import Point, Row
from experiments.lib.tables import table


class Sweep:
  """The runs of some rows of a table: which are done, and how long the others may take.

  A run is done if a record has its key and the hash of its settings. An interrupted run resumes
  only with the same source code of the library.
  """

  def __init__(
    self,
    name: str,
    rows: list[Row],
    records: Records,
    folder: pathlib.Path,
    *,
    same_code: bool = False,
  ):
    """Args:
    folder: for workdirs of runs in progress.
    same_code: count only records of the current source code of the library.
    """
    self._name, self._rows, self._records, self._folder = name, rows, records, folder / name
    self._code, self._same_code = provenance.code_hash(), same_code
    # Of the runs trained by this process, to estimate the remaining time.
    self._seconds, self._flops = 0.0, 0.0

  def recorded(self, row: Row, point: Point, seed: int) -> dict | None:
    """The metrics of a run that is done; None if it is missing."""
    hashes = dict(settings=row.make(point, seed).settings_hash())
    if self._same_code:
      hashes |= dict(code=self._code)
    record = self._records.find(row.run_key(point, seed), hashes)
    return record and record["metrics"]

  def missing(self, row: Row) -> int:
    """Number of runs of a row that are not done."""
    first, *others = row.seeds
    found = []
    for point in row.grid:
      found.append(self.recorded(row, point, first))
      if row.is_enough(found[-1]):
        break
    if None in found:
      return found.count(None) + len(others)
    best = _best(row, found)
    return sum(self.recorded(row, best, seed) is None for seed in others)

  def rows_to_train(self) -> list[Row]:
    """The rows with missing runs.

    Raises:
      ValueError: the evaluators of one of them do not report its metric.
    """
    rows = [row for row in self._rows if self.missing(row)]
    for row in rows:
      row.check_metric(row.make(row.grid[0], row.seeds[0]).metric_names())
    return rows

  def summary(self) -> str:
    """A table of the runs that are done: settings, metric, updates and seconds."""
    lines = []
    for row in self._rows:
      runs = [(point, row.seeds[0]) for point in row.grid]
      # Other seeds are trained with the best point only.
      runs += [(point, seed) for seed in row.seeds[1:] for point in row.grid]
      for point, seed in runs:
        if found := self.recorded(row, point, seed):
          shown = ", ".join(f"{name} {value:g}" for name, value in point.items())
          value = "diverged" if "diverged" in found else f"{found['evaluation'][row.metric]:.4f}"
          cost = [found.get("updates"), found["seconds"]]
          cells = [row.name, shown, str(seed), row.metric, value]
          lines.append([*cells, *("–" if x is None else str(x) for x in cost)])
    return table(["row", "point", "seed", "metric", "value", "updates", "seconds"], lines)

  def train(self) -> list[str]:
    """Train the missing runs; return names of rows that other processes are training.

    Raises:
      ValueError: the evaluators of a row do not report its metric; before any training.
    """
    elsewhere = []
    for row in self.rows_to_train():
      if not self.missing(row):  # another process has trained it by now
        continue
      with self._locked(row) as acquired:
        if acquired:
          self._train(row)
        else:
          elsewhere.append(row.name)
    return elsewhere

  def _train(self, row: Row):
    first, *others = row.seeds
    found = []
    for point in row.grid:
      found.append(self._run(row, point, first))
      if row.is_enough(found[-1]):
        break
    best = _best(row, found)
    for seed in others:
      self._run(row, best, seed)

  @contextlib.contextmanager
  def _locked(self, row: Row):
    """Lock a row against other processes; yields whether the lock was acquired."""
    path = self._folder / f"{row.name}.claim"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
      try:
        stack.enter_context(locked(path))
      except LockedError:
        yield False
        return
      yield True
      path.unlink()

  def _run(self, row: Row, point: Point, seed: int) -> dict:
    """The metrics of a run: from its record, or by training it."""
    if metrics := self.recorded(row, point, seed):
      return metrics
    made, settings = row.make(point, seed), point | dict(seed=seed)
    shown = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    print(f"{self._name} {row.name}, {shown}: {self._remaining()}", flush=True)
    name = "-".join(f"{value:g}" for value in settings.values())
    workdir = training.temporary_workdir(self._folder / row.name, name, made)
    start = time.perf_counter()
    metrics = training.train_and_record(
      made,
      workdir,
      row.run_key(point, seed),
      lambda last: sweep_spec.summarize_run(row, made, workdir, last),
      records=self._records,
      # The worst value that JSON can store.
      diverged=dict(evaluation={row.metric: 1e9 if row.lower else 0.0}, diverged=True),
    )
    if metrics["seconds"] is not None:
      share = metrics.get("updates", made.config.steps) / made.config.steps
      self._seconds += metrics["seconds"]
      self._flops += share * made.flops()
    # Compiled programs of hundreds of models would fill the memory.
    jax.clear_caches()
    took = time.perf_counter() - start
    value = metrics["evaluation"][row.metric]
    print(f"  {row.metric} {value:.4f} after {metrics.get('updates')} updates, {took:.0f} s")
    return metrics

  def _remaining(self) -> str:
    """Number of runs left, and an upper bound of their time at the speed so far."""
    left, flops = 0, 0.0
    for row in self._rows:
      if missing := self.missing(row):
        left += missing
        flops += missing * row.make(row.grid[0], row.seeds[0]).flops()
    shown = f"{left} runs left"
    if not self._flops:
      return shown
    minutes = round(flops * self._seconds / self._flops / 60)
    return f"{shown}, at most {minutes // 60} h {minutes % 60:02d} min here"

  def listing(self) -> str:
    """A table of the rows: model size, cost, and how many runs are done."""
    lines, total = [], 0.0
    for row in self._rows:
      made = row.make(row.grid[0], row.seeds[0])
      cfg, flops = made.config, made.flops() * row.runs
      tokens = cfg.steps * cfg.data.batch * cfg.data.length
      sizes = [f"{made.parameters():,}", f"{cfg.steps:,}", f"{tokens:.2e}", str(row.runs)]
      lines.append([row.name, *sizes, f"{flops:.1e}", str(row.runs - self.missing(row))])
      total += flops
    header = ["row", "parameters", "updates", "tokens", "runs", "FLOP of all runs", "done"]
    return f"{table(header, lines)}{len(lines)} rows, {total:.2e} FLOP in all"


def _best(row: Row, found: list[dict]) -> Point:
  """The best grid point, given the metrics of the first points of the grid."""
  return row.grid[row.best([x["evaluation"] for x in found])]
