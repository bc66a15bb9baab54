"""Language models of one size and budget: bits per byte, recall, and loss in longer contexts."""

import statistics

from matplotlib.figure import Figure

from experiments.configs.language_modeling import LENGTH, MAIN, MULTIPLES, PAPER
from experiments.lib.tables import table
from experiments.plots import chosen, style

# Row -> label, in the order of the paper's table.
NAMES = {
  "transformer": "Transformer++",
  "retnet": "RetNet",
  "mamba": "Mamba",
  "linear-attention": "linear attention",
  "gla": "GLA",
  "gla-conv": "GLA, conv",
  "deltanet-noconv": "DeltaNet, no conv",
  "deltanet": "DeltaNet",
  "deltanet-sliding": "DeltaNet + sliding",
  "deltanet-global": "DeltaNet + global",
  "gated-deltanet": "Gated DeltaNet",
  "l1-elu": "DeltaNet, L1 & 1 + ELU",
  "l2-elu": "DeltaNet, L2 & 1 + ELU",
  "l2-relu": "DeltaNet, L2 & ReLU",
}
_BITS = "validation_bits_per_byte"


def _runs(rows):
  """Model -> evaluations of its seeds, in the order of NAMES."""
  found = chosen.runs(rows, ("set", "model"), _BITS, lower=True)
  return {name: found["small", name] for name in NAMES if ("small", name) in found}


def _mean(runs, metric):
  values = [x[metric] for x in runs if metric in x]
  return statistics.fmean(values) if values else None


def _cell(runs, metric, digits=3, scale=1.0):
  """Mean over seeds, with minimum and maximum if there are several."""
  values = [scale * x[metric] for x in runs if metric in x]
  if not values:
    return "–"
  mean = f"{statistics.fmean(values):.{digits}f}"
  if len(values) == 1:
    return mean
  return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _seconds(rows, model):
  found = [x["metrics"].get("seconds") for x in rows if x["key"]["model"] == model]
  known = [x for x in found if x is not None]
  return f"{statistics.median(known) / 60:.1f}" if known else "–"


def _agreement(found) -> str:
  """Number of pairs of models that the paper's perplexity and our bits per byte order equally."""
  both = [(PAPER[name][0], _mean(found[name], _BITS), name) for name in found if name in PAPER]
  pairs = [(a, b) for i, a in enumerate(both) for b in both[i + 1 :] if a[0] != b[0]]
  same = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs]
  if not pairs:
    return ""
  ours = ", ".join(NAMES[x[2]] for x in sorted(both, key=lambda x: x[1]))
  theirs = ", ".join(NAMES[x[2]] for x in sorted(both, key=lambda x: x[0]))
  return (
    f"Our bits per byte and the paper's perplexity order {sum(same)} of {len(pairs)} pairs of"
    f" models equally.\n\n- best first, here: {ours}\n- best first, paper: {theirs}\n"
  )


def tables(rows: list[dict]) -> str:
  found, lines = _runs(rows), []
  for name, runs in found.items():
    wiki, swde = PAPER.get(name, (None, None))
    lines.append(
      [
        NAMES[name],
        _cell(runs, _BITS),
        _cell(runs, "recall_gain", 2),
        _cell(runs, "recall_accuracy", 1, 100),
        _seconds(rows, name),
        "–" if wiki is None else f"{wiki:.2f}",
        "–" if swde is None else f"{swde:.1f}",
      ]
    )
  x = rows[0]["metrics"]
  header = ["model", "bits per byte", "recall gain", "recall, %", "minutes"]
  parts = [
    f"Byte-level models with {x['parameters'] / 1e3:.0f} thousand parameters, {x['of']:,} updates"
    " on the corpus of `make corpus` (novels, a Bible and commentaries on it). Validation split:"
    " bits per byte, and recall of values planted in the text: accuracy per byte of the values, and"
    " gain, the bits per byte saved if the value was in the context. Mean of the seeds (minimum to"
    " maximum). Paper: 340M parameters, 15 billion tokens.\n",
    table([*header, "paper, Wiki. ppl", "paper, SWDE"], lines),
    _agreement(found),
  ]
  longer = []
  for name, runs in found.items():
    if name in MAIN:
      cells = [_cell(runs, f"loss_{LENGTH * n}") for n in MULTIPLES]
      longer.append([NAMES[name], *cells])
  if longer:
    header = ["model", *(f"{n} × {LENGTH}" for n in MULTIPLES)]
    parts.append(
      f"## Longer contexts\n\nNats per byte of the same text.\n\n{table(header, longer)}"
    )
  return "\n".join(parts)


def _text_panel(panel, found):
  """A row per model, best on top, a dot per seed; outliers are written as numbers."""
  best_first = sorted(found, key=lambda name: _mean(found[name], _BITS))
  limit = 1.2 * _mean(found[best_first[len(found) // 2]], _BITS)
  for i, name in enumerate(best_first):
    values = [run[_BITS] for run in found[name]]
    delta = "delta" in name or name.startswith(("l1", "l2"))
    if min(values) > limit:
      panel.annotate(
        f"{min(values):.2f} →", (1, i), xycoords=("axes fraction", "data"), ha="right",
        va="center", fontsize=6,
      )  # fmt: skip
      continue
    panel.plot(values, [i] * len(values), "o-", color=style.color(0 if delta else 1), markersize=4)
  panel.set_yticks(range(len(best_first)), [NAMES[name] for name in best_first], fontsize=6)
  panel.set_ylim(len(best_first) - 0.5, -0.5)
  panel.set(title="Validation bits per byte", xlabel="bits per byte")


def figure(rows: list[dict]) -> Figure | None:
  """Bits per byte of every model, loss by position, loss by context length."""
  found = _runs(rows)
  if not found:
    return None
  drawn, (text, position, context) = style.panels(3, 3, (4.6, 3.6))
  _text_panel(text, found)
  longest = LENGTH * MULTIPLES[-1]
  main = [name for name in MAIN if name in found]
  position.set(
    title=f"Loss by position, context {longest}", xlabel="position (bytes)", ylabel="nats per byte"
  )
  context.set(title="Loss by context length", xlabel=f"context / {LENGTH}", ylabel="nats per byte")
  for i, name in enumerate(main):
    runs, color = found[name], style.color(i)
    prefix = f"loss_{longest}_from_"
    starts = sorted(int(x.removeprefix(prefix)) for x in runs[0] if x.startswith(prefix))
    losses = [(max(x, 8), _mean(runs, f"{prefix}{x}")) for x in starts]
    totals = [(n, y) for n in MULTIPLES if (y := _mean(runs, f"loss_{LENGTH * n}")) is not None]
    if losses and totals:
      position.plot(*zip(*losses), "-o", color=color, label=NAMES[name])
      context.plot(*zip(*totals), "-o", color=color)
  position.axvline(LENGTH, color="0.6", lw=0.8, ls=":")
  style.log_axis(position.xaxis, [16, 64, LENGTH, 1024])
  style.log_axis(context.xaxis, list(MULTIPLES))
  if position.lines[1:]:
    position.legend(fontsize=6)
  return drawn
