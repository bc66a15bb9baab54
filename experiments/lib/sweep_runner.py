"""Trains rows that are missing, one run after the other, each kept as soon as it ends."""

import contextlib
import pathlib
import shutil
import time

import jax

from deltanet_jax.files import LockedError, locked
from deltanet_jax.train import DivergenceError, saved_steps
from experiments.lib import provenance, sweep_spec, training
from experiments.lib.records import Records
from experiments.lib.sweep_spec import Point, Row
from experiments.lib.tables import table


class Sweep:
  """Runs of some rows of a table: which are done, and the time that the others may take.

  A run is done while its own settings are those its row was made with: their hash is in it. A run
  that was stopped goes on only with the library's code that it was begun with.
  """

  def __init__(
    self,
    name: str,
    rows: list[Row],
    out: Records,
    folder: pathlib.Path,
    *,
    same_code: bool = False,
  ):
    """Args:
    folder: of runs that are not finished.
    same_code: counts only rows made by the library's code as it is.
    """
    self._name, self._rows, self._out, self._folder = name, rows, out, folder / name
    self._code, self._same_code = provenance.code(), same_code
    self._seconds, self._flops = 0.0, 0.0  # of what was trained here

  def done(self, row: Row, point: Point, seed: int) -> dict | None:
    """The metrics of a run that counts."""
    facts = dict(settings=row.make(point, seed).settings())
    facts |= dict(code=self._code) if self._same_code else {}
    found = self._out.find(row.run_key(point, seed), facts)
    return found and found["metrics"]

  def missing(self, row: Row) -> int:
    """Runs of a row that are still to be trained."""
    first, *others = row.seeds
    found = []
    for point in row.grid:
      found.append(self.done(row, point, first))
      if row.settled(found[-1]):
        break
    if None in found:
      return found.count(None) + len(others)
    best = _best(row, found)
    return sum(self.done(row, best, seed) is None for seed in others)

  def train(self) -> list[str]:
    """Trains what is missing; returns the rows that other processes are training."""
    elsewhere = []
    for row in self._rows:
      if not self.missing(row):
        continue
      with self._claimed(row) as mine:
        if mine:
          self._train(row)
        else:
          elsewhere.append(row.name)
    return elsewhere

  def _train(self, row: Row):
    first, *others = row.seeds
    found = []
    for point in row.grid:
      found.append(self._run(row, point, first))
      if row.settled(found[-1]):
        break
    best = _best(row, found)
    for seed in others:
      self._run(row, best, seed)

  @contextlib.contextmanager
  def _claimed(self, row: Row):
    """Whether no other process trains this row; none does inside."""
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
    """The metrics of a run, which is trained, or goes on, if there are none."""
    if found := self.done(row, point, seed):
      return found
    made, settings = row.make(point, seed), point | dict(seed=seed)
    told = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    print(f"{self._name} {row.name}, {told}: {self._outlook()}", flush=True)
    name = "-".join(f"{value:g}" for value in settings.values())
    workdir = self._folder / row.name / f"{name}-{self._code}-{made.settings()}"
    begun, start = saved_steps(workdir), time.perf_counter()
    try:
      last = training.run(made.config, workdir, made.task, made.evaluators)
      metrics = sweep_spec.metrics(row, made, workdir, last)
    except DivergenceError as e:
      print(e)
      # The worst of any grid that JSON can hold.
      metrics = dict(evaluation={row.metric: 1e9 if row.lower else 0.0}, diverged=True)
    took = time.perf_counter() - start
    if not begun:
      share = metrics.get("updates", made.config.steps) / made.config.steps
      self._seconds, self._flops = self._seconds + took, self._flops + share * made.flops()
    # Of a run that went on in several starts nobody knows how long it took.
    metrics["seconds"] = None if begun else round(took, 1)
    facts = dict(code=self._code, settings=made.settings())
    self._out.write(row.run_key(point, seed), metrics, facts=facts)
    shutil.rmtree(workdir, ignore_errors=True)
    # Programs of hundreds of models would fill the memory.
    jax.clear_caches()
    result = metrics["evaluation"][row.metric]
    print(f"  {row.metric} {result:.4f} after {metrics.get('updates')} updates, {took:.0f} s")
    return metrics

  def _outlook(self) -> str:
    """How many runs are left, and how long they may take at the speed so far."""
    left, flops = 0, 0.0
    for row in self._rows:
      if missing := self.missing(row):
        left += missing
        flops += missing * row.make(row.grid[0], row.seeds[0]).flops()
    told = f"{left} runs left"
    if not self._flops:
      return told
    minutes = round(flops * self._seconds / self._flops / 60)
    return f"{told}, at most {minutes // 60} h {minutes % 60:02d} min here"

  def listing(self) -> str:
    """Rows with their sizes, and what is done of them."""
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
  """The point with the best of these metrics, of the first points of the grid."""
  return row.grid[row.best([x["evaluation"] for x in found])]
