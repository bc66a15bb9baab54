"""MAD: accuracy of each task and the mean, compared with the paper's table."""

import statistics

from experiments.configs.mad import PAPER, TASKS
from experiments.lib.tables import table
from experiments.plots import chosen

_TITLES = dict(
  compress="compress",
  fuzzy_recall="fuzzy",
  context_recall="in-context",
  memorize="memorize",
  noisy_recall="noisy",
  selective_copy="copy",
)
_METRIC = "validation_macro_accuracy"
_SETS = dict(small="## Small: one setting per task", paper="## Full scale")


def _scores(rows, name):
  """Model -> task -> for every setting, the test accuracies of its seeds."""
  rows = [row for row in rows if row["key"]["set"] == name]
  scores: dict[str, dict[str, list]] = {}
  for row_key in {_row(row) for row in rows}:
    group = [row for row in rows if _row(row) == row_key]
    key = group[0]["key"]
    (seeds,) = chosen.runs(group, _fields(key), _METRIC).values()
    tasks = scores.setdefault(key["model"], {})
    tasks.setdefault(key["task"], []).append([x["test_macro_accuracy"] for x in seeds])
  return scores


_POINT = ("learning_rate", "weight_decay", "seed")


def _fields(key):
  return tuple(name for name in key if name not in _POINT)


def _row(row):
  return tuple((name, row["key"][name]) for name in _fields(row["key"]))


def _line(tasks):
  """Cells of the six tasks, and their mean if all have records."""
  cells, means = [], []
  for task in TASKS:
    settings = tasks.get(task, [])
    if len(settings) == 1:
      cells.append(chosen.cell(settings[0]))
    else:
      every = [statistics.median(seeds) for seeds in settings]
      cells.append(chosen.cell([statistics.fmean(every)] if every else []))
    means += [statistics.fmean(map(statistics.median, settings))] if settings else []
  mean = [statistics.fmean(means)] if len(means) == len(TASKS) else []
  return [*cells, chosen.cell(mean)]


def _why(rows) -> str:
  """Accuracy of `memorize` by convolution width and number of examples, and the training loss."""
  rows = [row for row in rows if row["key"]["set"] == "why"]
  if not rows:
    return ""
  found = chosen.runs(rows, ("model", "conv", "examples"), _METRIC)
  columns = sorted({key[1:] for key in found}, key=lambda x: x[::-1])
  lines = []
  for model in chosen.models(rows):
    cells = [
      chosen.cell([x["test_macro_accuracy"] for x in found.get((model, *c), [])]) for c in columns
    ]
    of_model = [x["metrics"]["training_loss"] for x in rows if x["key"]["model"] == model]
    lines.append([chosen.title(model), *cells, f"{max(of_model):.2f}"])
  conv = lambda c: f"conv width {c}" if c else "no conv"
  header = ["model", *(f"{conv(c)}, {n:,} examples" for c, n in columns), "largest training loss"]
  return (
    "\n## Memorize: convolutions and examples\n\nFive seeds, learning rate 3e-3, 400 updates or"
    " until the accuracy is 99.9 %.\n\n" + table(header, lines)
  )


def tables(rows: list[dict]) -> str:
  header, parts = ["model", *_TITLES.values(), "mean"], []
  for name, heading in _SETS.items():
    if scores := _scores(rows, name):
      order = [model for model in chosen.models(rows) if model in scores]
      lines = [[chosen.title(model), *_line(scores[model])] for model in order]
      parts.append(f"{heading}\n\n{table(header, lines)}")
  lines = [
    [chosen.title(model), *map(chosen.percent, values), f"{statistics.fmean(values):.1f}"]
    for model, values in PAPER.items()
  ]
  return (
    "Macro accuracy in percent (averaged over classes of tokens) on the test split; median of the"
    " seeds (minimum to maximum). Learning rate and weight decay are selected on the validation"
    " split with the first seed.\n\n"
    + "\n".join(parts)
    + _why(rows)
    + f"\n## Paper\n\n{table(header, lines)}"
  )
