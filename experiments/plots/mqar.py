"""MQAR: accuracy by width and by number of pairs, compared with the paper's figure."""

import statistics

from matplotlib.figure import Figure

from experiments.configs.mqar import ENOUGH, PAPER
from experiments.lib.tables import table
from experiments.plots import chosen, style

_FIELDS = ("set", "model", "width", "pairs")
_WIDTHS = (64, 128, 256, 512)  # the paper's


def _runs(rows):
  """(set, model, width, pairs) -> test accuracies of the seeds."""
  found = chosen.runs(rows, _FIELDS, "validation_accuracy", enough=ENOUGH)
  return {key: [x["test_accuracy"] for x in seeds] for key, seeds in found.items()}


def _sides(found, name):
  """The largest number of pairs with its widths, and the width with the most numbers of pairs."""
  keys = [key for key in found if key[0] == name]
  most = max(key[3] for key in keys)
  of_width = {w: {key[3] for key in keys if key[2] == w} for w in {key[2] for key in keys}}
  width = max(of_width, key=lambda w: len(of_width[w]))
  widths = sorted(key for key in {key[2] for key in keys if key[3] == most})
  return (most, widths), (width, sorted(of_width[width]))


def tables(rows: list[dict]) -> str:
  found, parts = _runs(rows), []
  if any(key[0] == "small" for key in found):
    (most, widths), (width, pairs) = _sides(found, "small")
    at = lambda model, w, k: found.get(("small", model, w, k), [])
    lines, others = [], []
    for model in chosen.models(rows):
      paper = [chosen.percent(PAPER.get(model, {}).get(w)) for w in _WIDTHS]
      lines.append(
        [chosen.title(model), *(chosen.cell(at(model, w, most)) for w in widths), *paper]
      )
      seeds = max(len(at(model, width, k)) for k in pairs)
      cells = [chosen.cell(at(model, width, k)) for k in pairs]
      others.append([chosen.title(model), *cells, str(seeds)])
    header = ["model", *(f"width {w}" for w in widths), *(f"paper, {w}" for w in _WIDTHS)]
    parts.append(
      f"## By width\n\nOurs: sequences of 64 tokens with {most} pairs, vocabulary 128, two layers."
      " Paper: 512 tokens, 64 pairs, vocabulary 8192, four layers, Mamba with a convolution and the"
      f" others without.\n\n{table(header, lines)}"
    )
    header = ["model", *(f"{k} pairs" for k in pairs), "seeds"]
    parts.append(f"## By number of pairs\n\nWidth {width}.\n\n{table(header, others)}")
  if longer := {key: x for key, x in found.items() if key[0] == "long"}:
    lines = [
      [chosen.title(model), str(width), str(pairs), chosen.cell(longer[_, model, width, pairs])]
      for _, model, width, pairs in longer
    ]
    parts.append(
      "## Without convolutions, more updates\n\nSequences of 32 tokens, vocabulary 64, four"
      " layers. Guessing among the values in the context gives 1 / pairs.\n\n"
      + table(["model", "width", "pairs", "accuracy"], lines)
    )
  if any(key[0] == "paper" for key in found):
    header = ["model", *(f"width {w}" for w in _WIDTHS), *(f"paper, {w}" for w in _WIDTHS)]
    lines = []
    for model in chosen.models([row for row in rows if row["key"]["set"] == "paper"]):
      ours = [chosen.cell(found.get(("paper", model, w, 64), [])) for w in _WIDTHS]
      paper = [chosen.percent(PAPER.get(model, {}).get(w)) for w in _WIDTHS]
      lines.append([chosen.title(model), *ours, *paper])
    parts.append(f"## Full scale\n\n{table(header, lines)}")
  return (
    "Accuracy in percent of the answers to queries (argmax over the vocabulary) on the test split;"
    " median of the seeds (minimum to maximum). The learning rate is selected on the validation"
    f" split with the first seed; of several that reach {ENOUGH:.0%}, the lowest.\n\n"
    + "\n".join(parts)
  )


# Models without a variant, by whether they have convolutions; attention is shown in both.
_WITH = ("attention", "hyena", "multihead-hyena")
_WITHOUT = ("attention", "rwkv4")


def figure(rows: list[dict]) -> Figure | None:
  """Medians as lines, a dot per seed; with convolutions above, without below."""
  rows = [row for row in rows if row["key"]["set"] == "small"]
  if not rows:
    return None
  found = _runs(rows)
  (most, widths), (width, pairs) = _sides(found, "small")
  drawn, axes = style.panels(4, 2, (4.6, 3.2))
  for i, panel in enumerate(axes):
    with_conv, by_width = i < 2, i % 2 == 0
    values = widths if by_width else pairs
    style.log_axis(panel.xaxis, values)
    with_or_without = "with" if with_conv else "without"
    fixed = f"{most} pairs" if by_width else f"width {width}"
    panel.set(
      title=f"{fixed}, {with_or_without} convolutions", ylabel="accuracy (%)", ylim=(0, 104)
    )
    panel.set(
      xlabel="width" if by_width else "number of pairs", xlim=(values[0] / 1.1, values[-1] * 2.4)
    )
    ends, single = [], []  # labels of single points would cross other lines on their right
    for model in chosen.models(rows):
      family = model.removesuffix(chosen.CONV)
      shown = model in _WITH if with_conv else model in _WITHOUT
      if not shown and (family in _WITH + _WITHOUT or (model != family) != with_conv):
        continue
      key = lambda x: ("small", model, x, most) if by_width else ("small", model, width, x)
      color = style.color(list(chosen.NAMES)[::-1].index(family))
      medians = [(x, 100 * statistics.median(found[key(x)])) for x in values if key(x) in found]
      dots = [(x, 100 * y) for x in values for y in found.get(key(x), [])]
      if medians:
        panel.plot(*zip(*medians), "-", color=color)
        panel.plot(*zip(*dots), "o", color=color, ms=2.5)
        end = (*medians[-1], chosen.NAMES[family], color)
        (ends if len(medians) > 1 else single).append(end)
    style.direct_labels(panel, ends, gap=0.07)
    style.direct_labels(panel, single, gap=0.07, left=True)
  return drawn
