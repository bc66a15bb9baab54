"""Training throughput by sequence length, compared with the paper's figure."""

from matplotlib.figure import Figure

from experiments.lib.tables import table
from experiments.plots import style

# Thousand tokens/s of 1.3B models on one H100, from length 2K x batch size 8 to 16K x 1.
PAPER_LENGTHS = (2048, 4096, 8192, 16384)
PAPER = {
  "transformer": (51.3, 46.7, 38.7, 29.1),
  "mamba": (22.8, 22.8, 22.8, 26.0),
  "gla": (43.8, 43.5, 43.2, 41.1),
  "deltanet": (41.5, 41.6, 40.0, 37.3),
}
TITLES = {
  "transformer": "Transformer++",
  "mamba": "Mamba",
  "gla": "GLA",
  "retnet": "RetNet",
  "deltanet": "DeltaNet",
  "deltanet-sliding": "DeltaNet + sliding",
  "deltanet-global": "DeltaNet + global",
}


def length_name(n: int) -> str:
  return f"{n // 1024}K" if n >= 1024 else str(n)


def _curves(rows):
  """Model -> {length: tokens per second}, models in the order of TITLES."""
  found = {name: {} for name in TITLES}
  for row in rows:
    found[row["key"]["model"]][row["key"]["length"]] = row["metrics"]["tokens_per_second"]
  return {name: dict(sorted(curve.items())) for name, curve in found.items() if curve}


def _shape(rows):
  key = rows[0]["key"]
  return f"width {key['width']}, {key['depth']} layers, {key['tokens']:,} tokens per batch"


def crossing(curves, slower, faster) -> str:
  """Lengths between which `slower` falls below `faster` for all longer ones."""
  lengths = [n for n in curves[slower] if n in curves[faster]]
  below = [curves[slower][n] < curves[faster][n] for n in lengths]
  if not below[-1]:
    return "not up to the longest"
  first = max((i + 1 for i, x in enumerate(below) if not x), default=0)
  return (
    "at every length" if first == 0 else f"between {lengths[first - 1]:,} and {lengths[first]:,}"
  )


def tables(rows: list[dict]) -> str:
  curves = _curves(rows)
  lengths = sorted({n for curve in curves.values() for n in curve})
  ours = []
  for name, curve in curves.items():
    cells = [f"{curve[n]:,.0f}" if n in curve else "–" for n in lengths]
    ours.append([TITLES[name], *cells, f"{curve[max(curve)] / curve[min(curve)]:.2f}"])
  header = ["tokens/s", *(f"{n:,}" for n in lengths), "last / first"]
  paper = [
    [TITLES[name], *(f"{1000 * x:,.0f}" for x in values), f"{values[-1] / values[0]:.2f}"]
    for name, values in PAPER.items()
  ]
  text = (
    f"Training updates of models of {_shape(rows)}, {rows[0]['provenance']['machine']}; by sequence"
    f" length.\n\n{table(header, ours)}\n"
    "Paper: 1.3B models on one H100, 16,384 tokens per batch.\n\n"
    + table(["tokens/s", *(f"{n:,}" for n in PAPER_LENGTHS), "last / first"], paper)
  )
  if {"transformer", "deltanet"} <= set(curves):
    where = crossing(curves, "transformer", "deltanet")
    text += (
      f"\nTransformer++ is slower than DeltaNet: {where}. In the paper: between 4,096 and 8,192.\n"
    )
  return text


def figure(rows: list[dict]) -> Figure:
  drawn, (ours, theirs) = style.panels(2, 2, (4.4, 3.2))
  curves = _curves(rows)
  paper = {name: dict(zip(PAPER_LENGTHS, values)) for name, values in PAPER.items()}
  colors = {name: style.color(i) for i, name in enumerate(TITLES)}
  shown = (
    (ours, curves, 1000, f"Ours, {_shape(rows)}"),
    (theirs, paper, 1, "Paper, 1.3B on an H100"),
  )
  for panel, found, unit, title in shown:
    ends = []
    for name, curve in found.items():
      values = [x / unit for x in curve.values()]
      panel.plot(list(curve), values, "o-", color=colors[name], markersize=3)
      ends.append((max(curve), values[-1], TITLES[name], colors[name]))
    lengths = sorted({n for curve in found.values() for n in curve})
    style.log_axis(panel.xaxis, lengths, list(map(length_name, lengths)))
    panel.set(title=title, xlabel="sequence length", ylabel="thousand tokens/s")
    panel.set_ylim(bottom=0)
    panel.set_xlim(lengths[0] / 1.2, lengths[-1] * (lengths[-1] / lengths[0]) ** 0.55)
    style.direct_labels(panel, ends)
  drawn.suptitle(rows[0]["provenance"]["machine"], fontsize=8, color="0.4")
  return drawn
