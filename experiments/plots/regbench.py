"""RegBench: accuracy against the number of training sequences, beside the paper's figure."""

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
  """n -> percent of letters that counting in the row itself finds, where it was measured."""
  setting = dict(small="mini", paper="full")[name]
  of_setting = [x for x in records.read("regbench_ngram") if x["key"]["setting"] == setting]
  shares = zip(*(row["metrics"]["dfa_accuracy"] for row in of_setting))
  return {n: round(100 * statistics.fmean(x), 1) for n, x in enumerate(shares, 1)}


def tables(rows: list[dict]) -> str:
  parts = []
  for name, told in (("small", "## Small"), ("paper", "## At full scale")):
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
    for n, share in _ngrams(name).items():
      full = chosen.percent(_ngrams("paper").get(n))
      lines.append([f"{n}-gram of the row", *[f"{share}"] * len(sizes), *[full] * len(PAPER_SIZES)])
    parts.append(f"{told}\n\n{table(header, lines)}")
  return (
    "Percent of predicted letters (argmax) that the row's automaton accepts, by number of"
    " training sequences; median of the seeds (lowest to highest), settings chosen by validation"
    " loss with the first seed.\n\n" + "\n".join(parts)
  )


def figure(rows: list[dict]) -> Figure | None:
  """Ours, small, and the paper's; with convolutions as full lines, without as broken ones."""
  ours = {key: 100 * statistics.median(x) for key, x in _runs(rows, "small").items()}
  if not ours:
    return None
  paper = {(model, x): y for model, line in PAPER.items() for x, y in line.items()}
  drawn, axes = style.panels(2, 2, (5.4, 3.6))
  titles = ("Small automata, ours", "The paper")
  for panel, name, values, told in zip(axes, ("small", "paper"), (ours, paper), titles):
    sizes = sorted({examples for _, examples in values})
    style.log_axis(panel.xaxis, sizes, [f"{x:,}" for x in sizes])
    panel.set(title=told, xlabel="training sequences", ylabel="accepted letters (%)")
    panel.set(xlim=(sizes[0] / 1.1, sizes[-1] * 2.6), ylim=(40, 100))
    for n, share in _ngrams(name).items():
      if n == 4:
        continue  # its line is that of 5
      panel.axhline(share, color="0.6", lw=0.8, ls=":")
      panel.text(sizes[-1] * 2.5, share - 1.6 * (n == 3), f" {n}-gram", color="0.5", fontsize=7)
    ends = []
    there = {model for model, _ in values}
    for model in (x for name in chosen.NAMES for x in (name, name + chosen.CONV) if x in there):
      family = model.removesuffix(chosen.CONV)
      color = style.colour(list(chosen.NAMES)[::-1].index(family))
      line = [(x, values[model, x]) for x in sizes if (model, x) in values]
      full = model != family or family == "attention"
      panel.plot(*zip(*line), "-" if full else "--", color=color, marker="o", ms=3)
      ends.append((*line[-1], chosen.title(model), color))
    style.direct_labels(panel, ends, gap=0.06)
  return drawn
