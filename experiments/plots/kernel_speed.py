"""Speed-up of chunkwise over recurrent against length, beside the paper's curve.

python -m experiments.plots.kernel_speed results/kernel_speed/runs.jsonl figure.png
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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


def paper_speedup(head_size: int) -> dict[int, float]:
  """Length to speed-up, as printed in the paper."""
  recurrent, chunked = PAPER[head_size]
  return {L: r / c for L, r, c in zip(PAPER_LENGTHS, recurrent, chunked)}


def draw(rows: list[dict], path: pathlib.Path):
  """One panel each for forward, forward+backward, and the paper's own figure."""
  figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
  sizes = sorted({row["head_size"] for row in rows})
  colours = dict(zip(sorted({*sizes, *PAPER}), plt.rcParams["axes.prop_cycle"].by_key()["color"]))
  for panel, direction in zip(panels, ("forward", "forward+backward")):
    for size in sizes:
      picked = sorted(
        (r["length"], r["speedup"])
        for r in rows
        if r["head_size"] == size and r["direction"] == direction and r["form"] == "chunkwise"
      )
      panel.plot(*zip(*picked), marker="o", color=colours[size], label=f"head size {size}")
    panel.set_title(f"{direction}, this machine ({rows[0]['machine']})", fontsize=9)
  for size in PAPER:
    curve = paper_speedup(size)
    panels[2].plot(curve.keys(), curve.values(), marker="s", color=colours[size], label=f"{size}")
  panels[2].set_title("the paper's figure: Triton kernels on a GPU", fontsize=9)
  for panel in panels:
    panel.axhline(1, color="grey", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    lengths = sorted({int(x) for line in panel.get_lines()[:-1] for x in line.get_xdata()})
    panel.set_xticks(lengths, [f"{x}" for x in lengths], fontsize=8)
    panel.set_xlabel("sequence length")
    panel.set_ylabel("speed-up over recurrent (×)")
    panel.grid(alpha=0.3, which="both")
    for axis in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
      axis("{x:g}")
    panel.tick_params(axis="y", which="both", labelsize=7)
    panel.legend(fontsize=8)
  figure.savefig(path, dpi=110)
  plt.close(figure)


if __name__ == "__main__":
  source, target = map(pathlib.Path, sys.argv[1:])
  draw([json.loads(line) for line in source.read_text().splitlines()], target)
