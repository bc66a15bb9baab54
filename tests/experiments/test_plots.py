"""Tables and figures of the committed records."""

import importlib

import pytest

from experiments.lib import records
from experiments.lib.tables import table
from experiments.plots import __main__ as plots
from experiments.plots import kernel_speed

PROVENANCE = dict(machine="a machine", commit="abc", date="2026-01-01T00:00:00")


MEASURED = [name for name in plots.MODULES if records.read(name)]


@pytest.mark.parametrize("name", MEASURED)
def test_tables_are_narrow(name):
  text = plots.document(name, records.read(name))
  lines = [line for line in text.splitlines() if line.startswith("|")]
  assert lines and all(line.count("|") <= 10 for line in lines)


@pytest.mark.parametrize("name", plots.MODULES)
def test_committed_tables_match_the_records(name):
  """Every table.md is what `python -m experiments.plots` writes."""
  rows, file = records.read(name), records.results() / name / "table.md"
  assert file.exists() == bool(rows)
  if rows:
    assert file.read_text() == plots.document(name, rows), "run python -m experiments.plots"


def speed_rows():
  shape = dict(head_size=64, batch=1, heads=4, length=512, dtype="float32", memory="kept")
  key = lambda curve, direction, implementation: dict(
    curve=curve, **shape, direction=direction, implementation=implementation
  )
  metrics = dict(seconds=0.01, microseconds_per_token_and_head=1.0, temporary_bytes=1, rounds=1)
  for implementation in ("recurrent", "chunkwise"):
    for direction in ("forward", "forward+backward"):
      yield key("length", direction, implementation), metrics | dict(speedup=2.0)
  for implementation in ("recurrent", "chunkwise", "default"):
    yield key("forward", "forward", implementation), metrics | dict(speedup=2.0, over_fastest=1.0)
  yield key("batch_heads", "forward+backward", "default"), metrics | dict(over_cheapest=1.0)


def test_kernel_speed_shows_the_paper():
  rows = [dict(key=k, metrics=x, provenance=PROVENANCE) for k, x in speed_rows()]
  text = kernel_speed.tables(rows)
  assert text.count("## ") == 3 and "4.0 ×" in text  # the paper's at 512 tokens
  assert len(kernel_speed.figure(rows).axes) == 4


def test_a_table_aligns_words_and_numbers():
  assert table(["name", "n"], [["a", "1"], ["bcd", "10"]]) == (
    "| name |   n |\n| ---- | --: |\n| a    |   1 |\n| bcd  |  10 |\n"
  )


def sweep_rows(table, metric, test):
  """Made-up records: two grid points, then another seed of the better one."""
  sets = ("small", "long", "why", "paper")
  for i, row in enumerate(sorted(table.ROWS, key=lambda row: sets.index(row.set))):
    points = row.grid[:2]
    runs = [(points[0], 0, 0.2), (points[-1], 0, 0.6), (points[-1], 1, 0.7)]
    for point, seed, score in runs[2 - len(points) :]:
      selected_by = -score if row.lower else score
      evaluation = {metric: selected_by, test: (i % 7) / 10 + score / 10}
      metrics = dict(evaluation=evaluation, training_loss=0.125)
      yield dict(key=row.run_key(point, seed), metrics=metrics, provenance=PROVENANCE)


@pytest.mark.parametrize(
  "name,metric,test,first",
  [
    ("mqar", "validation_accuracy", "test_accuracy", "6.5 (6.0 to 7.0)"),
    ("mad", "validation_macro_accuracy", "test_macro_accuracy", "6.5 (6.0 to 7.0)"),
    ("regbench", "validation_loss", "test_dfa_accuracy", "6.5 (6.0 to 7.0)"),
  ],
)
def test_sweep_tables_show_the_paper(name, metric, test, first):
  rows = list(sweep_rows(importlib.import_module(f"experiments.configs.{name}"), metric, test))
  text = plots.document(name, rows)
  lines = [line for line in text.splitlines() if line.startswith("|")]
  assert first in text and all(line.count("|") <= 10 for line in lines)
  module = plots.MODULES[name]
  if hasattr(module, "figure"):
    assert len(module.figure(rows).axes) == {"mqar": 4, "regbench": 2}[name]
    assert module.figure([]) is None
  else:
    assert "| DeltaNet, conv " in text and "71.8 |" in text
    assert "conv width 2, 256 examples" in text and "0.12 |" in text
