"""Tokens per second and memory against context, DeltaNet beside Transformer++.

python -m experiments.plots.decode_speed results/decode_speed/decode_speed.jsonl figure.png
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(rows: list[dict], path: pathlib.Path):
  """Two panels with one line per preset, all axes logarithmic."""
  figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
  panels = (("tokens_per_second", "tokens / s"), ("state_bytes", "bytes of decode state"))
  for axis, (field, label) in zip(axes, panels):
    for name in dict.fromkeys(row["preset"] for row in rows):
      mine = [row for row in rows if row["preset"] == name]
      axis.loglog([row["context"] for row in mine], [row[field] for row in mine], "o-", label=name)
    axis.set_xlabel("tokens of context")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
  axes[0].legend(frameon=False)
  first = rows[0]
  figure.suptitle(
    f"width {first['width']}, depth {first['depth']}, batch {first['batch']}, {first['machine']}",
    fontsize=9,
  )
  figure.savefig(path, dpi=150)


if __name__ == "__main__":
  source, target = map(pathlib.Path, sys.argv[1:])
  draw([json.loads(line) for line in source.read_text().splitlines()], target)
