"""Matplotlib style shared by all figures."""

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLORS = ("#1f6fb2", "#e07b28", "#3a9a5b", "#8a5fb5", "#b04848")
_COLORS += ("#6b6b6b", "#c2a500", "#17a2a2", "#d45da0")
_SETTINGS = {
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.titlesize": 10,
  "axes.titleweight": "bold",
  "axes.titlelocation": "left",
  "axes.labelsize": 9,
  "axes.grid": True,
  "grid.color": "0.9",
  "xtick.labelsize": 8,
  "ytick.labelsize": 8,
  "legend.frameon": False,
  "legend.fontsize": 8,
  "lines.markersize": 4.5,
  "axes.prop_cycle": cycler(color=_COLORS),
  "axes.axisbelow": True,
}
matplotlib.rcParams.update(_SETTINGS)


def panels(count: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
  """A figure of `count` panels of this size (in inches) in `columns` columns."""
  rows = -(-count // columns)
  columns = min(columns, count)
  figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
  return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def color(i: int) -> str:
  return _COLORS[i]


def log_axis(axis, values: list[float], labels: list[str] | None = None):
  """Make an axis (`axes.xaxis` or `.yaxis`) logarithmic, with ticks only at these values."""
  axis.axes.set(**{f"{axis.axis_name}scale": "log"})
  axis.set_ticks(values, labels or [f"{x:g}" for x in values])
  axis.set_ticks([], minor=True)


def direct_labels(
  axes: Axes, ends: list[tuple[float, float, str, str]], gap: float = 0.055, left: bool = False
):
  """Label lines at their right (left) ends, (x, y, text, color), without overlaps."""
  to_axes = lambda x, y: axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
  ends = sorted(ends, key=lambda end: end[1])
  heights, placed = [], 0.03 - gap  # above the x axis
  for x, y, *_ in ends:
    placed = max(to_axes(x, y)[1], placed + gap)
    heights.append(placed)
  # Move labels that were pushed above the top down again, and those below them.
  most = 1.0
  for i in reversed(range(len(heights))):
    heights[i] = min(heights[i], most)
    most = heights[i] - gap
  for (x, y, text, color), height in zip(ends, heights):
    across = to_axes(x, y)[0] + (-0.02 if left else 0.02)
    options = dict(transform=axes.transAxes, va="center", ha="right" if left else "left")
    # Grid lines and baselines must not cross the text.
    options |= dict(bbox=dict(facecolor="white", edgecolor="none", pad=0.6))
    axes.text(across, height, text, fontsize=8, color=color, **options)
