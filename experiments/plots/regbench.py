"""RegBench: accuracy by number of training sequences, compared with the paper's figure."""

import statistics

from matplotlib.figure import Figure

from experiments.configs.regbench import PAPER, PAPER_SIZES
from experiments.lib import records
from experiments.lib.tables import table
from experiments.plots import chosen, style


def _runs(rows, name):
  """(model, examples) -> test accuracies of the seeds."""
  rows = [row for row in rows if row["key"]["set"] == name]
  found = chosen.runs(rows, ("model", "examples"), "validation_loss", lower=True)
  return {key: [x["test_dfa_accuracy"] for x in seeds] for key, seeds in found.items()}


def _ngrams(name):
  """n -> DFA accuracy in percent of in-context n-grams, if it was measured."""
  setting = dict(small="mini", paper="full")[name]
  of_setting = [x for x in records.read("regbench_ngram") if x["key"]["setting"] == setting]
  accuracies = zip(*(row["metrics"]["dfa_accuracy"] for row in of_setting))
  return {n: round(100 * statistics.fmean(x), 1) for n, x in enumerate(accuracies, 1)}


def tables(rows: list[dict]) -> str:
  parts = []
  for name, heading in (("small", "## Small"), ("paper", "## Full scale")):
    found = _runs(rows, name)
    if not found:
      continue
    sizes = sorted({examples for _, examples in found})
    header = ["model", *(f"{x:,}" for x in sizes), *(f"paper, {x:,}" for x in PAPER_SIZES)]
    lines = []
    for model in chosen.models(rows):
      ours = [chosen.cell(found.get((model, x), [])) for x in sizes]
      paper = [chosen.percent(PAPER.get(model, {}).get(x)) for x in PAPER_SIZES]
      lines.append([chosen.title(model), *ours, *paper])
    for n, accuracy in _ngrams(name).items():
      full = chosen.percent(_ngrams("paper").get(n))
      cells = [f"{accuracy}"] * len(sizes) + [full] * len(PAPER_SIZES)
      lines.append([f"in-context {n}-gram", *cells])
    parts.append(f"{heading}\n\n{table(header, lines)}")
  return (
    "DFA accuracy: percentage of predicted letters (argmax) that the automaton of the sequence"
    " accepts, by number of training sequences; median of the seeds (minimum to maximum)."
    " Hyperparameters are selected by validation loss with the first seed.\n\n" + "\n".join(parts)
  )


def figure(rows: list[dict]) -> Figure | None:
  """Ours (small) and the paper's; solid lines with convolutions, dashed without."""
  ours = {key: 100 * statistics.median(x) for key, x in _runs(rows, "small").items()}
  if not ours:
    return None
  paper = {(model, x): y for model, line in PAPER.items() for x, y in line.items()}
  drawn, axes = style.panels(2, 2, (5.4, 3.6))
  titles = ("Small automata (ours)", "Paper")
  for panel, name, values, title in zip(axes, ("small", "paper"), (ours, paper), titles):
    sizes = sorted({examples for _, examples in values})
    style.log_axis(panel.xaxis, sizes, [f"{x:,}" for x in sizes])
    panel.set(title=title, xlabel="training sequences", ylabel="DFA accuracy (%)")
    panel.set(xlim=(sizes[0] / 1.1, sizes[-1] * 2.6), ylim=(40, 100))
    for n, accuracy in _ngrams(name).items():
      if n == 4:
        continue  # would overlap 5
      panel.axhline(accuracy, color="0.6", lw=0.8, ls=":")
      panel.text(sizes[-1] * 2.5, accuracy - 1.6 * (n == 3), f" {n}-gram", color="0.5", fontsize=7)
    ends = []
    known = {model for model, _ in values}
    for model in (x for name in chosen.NAMES for x in (name, name + chosen.CONV) if x in known):
      family = model.removesuffix(chosen.CONV)
      color = style.color(list(chosen.NAMES)[::-1].index(family))
      line = [(x, values[model, x]) for x in sizes if (model, x) in values]
      solid = model != family or family == "attention"
      panel.plot(*zip(*line), "-" if solid else "--", color=color, marker="o", ms=3)
      ends.append((*line[-1], chosen.title(model), color))
    style.direct_labels(panel, ends, gap=0.06)
  return drawn
