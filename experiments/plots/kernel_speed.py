"""Speed of the implementations of the delta rule, compared with the paper's figure."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib.tables import table
from experiments.plots import style

# The paper's figure "Speed-up of the chunkwise parallel form vs. the recurrent form": milliseconds
# of (recurrent, chunkwise) Triton kernels on a GPU, width 2048, batch x length = 16384.
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PAPER = {
  64: (
    (10.7097, 10.9562, 14.0425, 24.4682, 47.6885, 94.9672),
    (2.6930, 2.4330, 2.4151, 2.5787, 3.0478, 4.0006),
  ),
  128: (
    (18.8856, 19.6152, 19.0975, 31.2284, 60.9088, 191.4909),
    (2.6611, 2.6409, 2.6484, 2.9655, 3.8531, 5.8325),
  ),
  256: (
    (47.2460, 47.4189, 47.8577, 83.5260, 166.8563, 330.6606),
    (4.6427, 4.6667, 4.6824, 4.7730, 5.8201, 9.0348),
  ),
}
_DIRECTIONS = ("forward", "forward+backward")


def paper_speedup(head_size: int) -> dict[int, float]:
  """Speedup by length, from the values of the paper's figure."""
  recurrent, chunked = PAPER[head_size]
  return {L: r / c for L, r, c in zip(PAPER_LENGTHS, recurrent, chunked)}


def _curve(rows, name):
  """Records of a curve, key and metrics merged."""
  return [row["key"] | row["metrics"] for row in rows if row["key"]["curve"] == name]


def _shape(row):
  names = ("memory", "dtype", "head_size", "batch", "heads", "length")
  return tuple(row[name] for name in names)


def _by_variant(rows):
  """Shape -> (direction, implementation) -> record."""
  found = {}
  for row in rows:
    found.setdefault(_shape(row), {})[row["direction"], row["implementation"]] = row
  return dict(sorted(found.items()))


def _length_table(rows):
  lines = []
  for (memory, dtype, d, batch, heads, length), variants in _by_variant(rows).items():
    cells = [str(d), f"{length:,}", f"{batch} x {heads}", f"{dtype}, {memory}"]
    for direction in _DIRECTIONS:
      slow, fast = (variants.get((direction, x)) for x in ("recurrent", "chunkwise"))
      if slow and fast:
        cells.append(f"{1e3 * slow['seconds']:.1f} / {1e3 * fast['seconds']:.1f}")
        cells.append(f"{fast['speedup']:.1f} ×")
      else:
        cells += ["–", "–"]
    paper = paper_speedup(d).get(length) if d in PAPER else None
    lines.append([*cells, f"{paper:.1f} ×" if paper else "–"])
  header = ["head size", "length", "batch x heads", "dtype, memory"]
  header += ["forward, ms", "speedup", "forward+backward, ms", "speedup", "paper"]
  return (
    "## Speedup of chunkwise over recurrent\n\nMilliseconds of recurrent / chunkwise on this"
    " machine, with freed memory kept by the process (as in training) or returned to the system"
    f" after every call; the paper's kernels ran on a GPU.\n\n{table(header, lines)}"
  )


def _forward_table(rows):
  lines = []
  for (memory, dtype, d, batch, heads, length), variants in _by_variant(rows).items():
    shown = [variants["forward", x] for x in ("recurrent", "chunkwise", "default")]
    cells = [str(d), f"{length:,}", f"{batch} x {heads}", f"{dtype}, {memory}"]
    cells += [f"{1e3 * x['seconds']:.2f}" for x in shown]
    lines.append([*cells, f"{shown[-1]['over_fastest']:.2f}"])
  header = ["head size", "length", "batch x heads", "dtype, memory"]
  header += ["recurrent, ms", "chunkwise, ms"]
  return (
    "## Forward pass only\n\nThe default (`implementation=None`), and its time relative to the"
    f" faster implementation.\n\n{table([*header, 'default, ms', 'relative to faster'], lines)}"
  )


def _cost_table(rows):
  lines = []
  for row in sorted(rows, key=_cost_order):
    cells = [str(row["head_size"]), f"{row['batch'] * row['heads']}", f"{row['batch']}"]
    kind = f"{row['dtype']}, {row['memory']}"
    cells += [f"{row['heads']}", f"{row['length']:,}", kind, f"{1e3 * row['seconds']:.1f}"]
    cost = f"{row['microseconds_per_token_and_head']:.2f}"
    lines.append([*cells, cost, f"{row['over_cheapest']:.2f}"])
  header = ["head size", "batch x heads", "batch", "heads", "length", "dtype, memory", "ms"]
  return (
    "## Cost per token and head, forward+backward\n\nAll shapes, timed alternately in one run.\n\n"
    f"{table([*header, 'µs per token and head', 'relative to cheapest'], lines)}"
  )


def _cost_order(row):
  return row["memory"], row["head_size"], row["length"], row["batch"] * row["heads"]


_TABLES = dict(length=_length_table, forward=_forward_table, batch_heads=_cost_table)


def tables(rows: list[dict]) -> str:
  found = {name: _curve(rows, name) for name in _TABLES}
  return "\n".join(show(found[name]) for name, show in _TABLES.items() if found[name])


def _speedups(axes: Axes, curves: dict[int, dict[int, float]], title: str):
  """Plot head size -> length -> speedup, one line per head size."""
  sizes = sorted({*PAPER, *curves})
  lengths = sorted({length for curve in curves.values() for length in curve})
  ticks = (0.5, 1, 2, 3, 5, 10, 20, 40)
  values = [x for curve in curves.values() for x in curve.values()]
  low, high = 0.8 * min(*values, 1), 1.25 * max(values)
  style.log_axis(axes.xaxis, lengths, [f"{x // 1024}k" if x > 999 else str(x) for x in lengths])
  style.log_axis(axes.yaxis, [x for x in ticks if low <= x <= high])
  axes.set(xlim=(lengths[0] / 1.15, lengths[-1] * 2.2), ylim=(low, high), title=title)
  axes.set(xlabel="sequence length", ylabel="speedup over recurrent")
  axes.axhline(1, color="0.5", lw=1)
  ends = []
  for size, curve in curves.items():
    color = style.color(sizes.index(size))
    axes.plot(*zip(*sorted(curve.items())), "o-", color=color)
    last = max(curve)
    ends.append((last, curve[last], f"d = {size}", color))
  style.direct_labels(axes, ends)


def _costs(axes: Axes, rows):
  sizes = sorted(PAPER)
  short = min(row["length"] for row in rows)
  counts = sorted({row["batch"] * row["heads"] for row in rows})
  ends = []
  for size in sorted({row["head_size"] for row in rows}):
    mine = [row for row in rows if row["head_size"] == size and row["length"] == short]
    points = sorted((row["batch"] * row["heads"], row["over_cheapest"]) for row in mine)
    axes.plot(*zip(*points), "o-", color=style.color(sizes.index(size)))
    ends.append((*points[-1], f"d = {size}", style.color(sizes.index(size))))
  style.log_axis(axes.xaxis, counts)
  top = max(1.3, 1.05 * max(row["over_cheapest"] for row in rows))
  axes.set(xlim=(counts[0] / 1.2, counts[-1] * 3.2), ylim=(0.9, top))
  axes.set(title="Cost per token and head", xlabel="batch × heads", ylabel="relative to cheapest")
  style.direct_labels(axes, ends)


def figure(rows: list[dict]) -> Figure | None:
  """Speedups here and in the paper, and cost per token and head; None without records of them."""
  memories = {row["key"]["memory"] for row in rows}
  memory = "kept" if "kept" in memories else "system"
  shown = dict(dtype="float32", memory=memory)
  float32 = [row for row in rows if shown.items() <= row["key"].items()]
  draw = []
  for direction, title in zip(reversed(_DIRECTIONS), ("Forward + backward", "Forward")):
    curves = {}
    for row in _curve(float32, "length"):
      if row["implementation"] == "chunkwise" and row["direction"] == direction:
        curves.setdefault(row["head_size"], {})[row["length"]] = row["speedup"]
    if curves:
      draw.append(lambda axes, curves=curves, t=title: _speedups(axes, curves, f"{t}, this CPU"))
  if draw:
    paper = {d: paper_speedup(d) for d in PAPER}
    draw.append(lambda axes: _speedups(axes, paper, "The paper's kernels, GPU"))
  if costs := _curve(float32, "batch_heads"):
    draw.append(lambda axes: _costs(axes, costs))
  if not draw:
    return None
  drawn, axes = style.panels(len(draw), 2, (4.2, 3.1))
  for show, panel in zip(draw, axes):
    show(panel)
  machine = rows[0]["provenance"]["machine"]
  freed = "kept" if memory == "kept" else "returned"
  drawn.suptitle(
    f"Chunkwise delta rule, float32, freed memory {freed}, {machine}",
    fontsize=8,
    color="0.4",
  )
  return drawn
