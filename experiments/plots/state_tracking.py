"""State tracking: accuracy at the last token of sequences longer than in training."""

import math
import statistics

from matplotlib.figure import Figure

from deltanet_jax.data.synthetic.state_tracking import GROUPS
from experiments.lib.tables import table
from experiments.plots import style

# Mixer -> label, in the order of tables.
NAMES = {
  "attention": "softmax attention",
  "linear-attention": "linear attention",
  "deltanet": "DeltaNet, β in (0, 1)",
  "deltanet-negative": "DeltaNet, β in (0, 2)",
  "deltaproduct": "DeltaProduct, 2 steps",
}
TITLES = {"parity": "Parity", "s3": "Permutations of three elements, S3"}


def _runs(rows, group):
  """Mixer -> the metrics of its seeds."""
  of = lambda mixer: [x for x in rows if (x["key"]["group"], x["key"]["mixer"]) == (group, mixer)]
  found = {mixer: [row["metrics"] for row in of(mixer)] for mixer in NAMES}
  return {mixer: runs for mixer, runs in found.items() if runs}


def _lengths(rows):
  return sorted({int(length) for row in rows for length in row["metrics"]["last"]})


def _at(runs, length, positions="last"):
  return [x[positions][str(length)] for x in runs if str(length) in x[positions]]


def _cell(values):
  """Median of the seeds, with minimum and maximum if they differ."""
  if not values:
    return "–"
  low, middle, high = (f"{x:.2f}" for x in (min(values), statistics.median(values), max(values)))
  return middle if low == high else f"{middle} ({low} to {high})"


def tables(rows: list[dict]) -> str:
  lengths, parts = _lengths(rows), []
  for group in GROUPS:
    lines = []
    for mixer, runs in _runs(rows, group).items():
      cells = [_cell(_at(runs, length)) for length in lengths]
      everywhere = _cell(_at(runs, lengths[-1], "all"))
      lines.append([NAMES[mixer], str(len(runs)), *cells, everywhere])
    if lines:
      header = ["mixer", "seeds", *(f"last of {length}" for length in lengths)]
      chance = 1 / math.factorial(GROUPS[group])
      parts.append(
        f"## {TITLES[group]}\n\nChance is {chance:.2f}.\n\n"
        + table([*header, f"all of {lengths[-1]}"], lines)
      )
  x = rows[0]["metrics"]
  return (
    f"Accuracy of one layer, trained on sequences of {x['trained_length']} tokens; median of the"
    " seeds (minimum to maximum).\n\n" + "\n".join(parts)
  )


def figure(rows: list[dict]) -> Figure:
  """Medians over seeds as lines, a dot per seed."""
  groups = [group for group in GROUPS if _runs(rows, group)]
  drawn, axes = style.panels(len(groups), 2, (5.2, 3.2))
  lengths = _lengths(rows)
  for panel, group in zip(axes, groups):
    style.log_axis(panel.xaxis, lengths, [f"{x}" for x in lengths])
    chance = 1 / math.factorial(GROUPS[group])
    panel.set(title=TITLES[group], xlabel="sequence length", ylabel="accuracy at the last token")
    panel.set(xlim=(lengths[0] / 1.15, lengths[-1] * 4), ylim=(0, 1.04))
    panel.axhline(chance, color="0.6", lw=0.8, ls=":")
    ends = []
    for mixer, runs in _runs(rows, group).items():
      color = style.color(list(NAMES)[::-1].index(mixer))
      medians = [(L, statistics.median(_at(runs, L))) for L in lengths if _at(runs, L)]
      panel.plot(*zip(*medians), "-", color=color)
      dots = [(L, y) for L in lengths for y in _at(runs, L)]
      panel.plot(*zip(*dots), "o", color=color, ms=3)
      ends.append((*medians[-1], NAMES[mixer], color))
    style.direct_labels(panel, ends, gap=0.065)
  return drawn
