"""The curve of a run: training loss and held-out bits per byte, with other models as lines."""

import json
import math
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(workdir: pathlib.Path, path: pathlib.Path, beside: dict[str, float]):
  """Writes a PNG from workdir/metrics.jsonl; `beside` are bits per byte to compare with."""
  rows = [json.loads(row) for row in (workdir / "metrics.jsonl").read_text().splitlines()]
  training = [(r["step"], r["loss"] / math.log(2)) for r in rows if r.get("loss") is not None]
  held_out = [
    (r["step"], r["validation_bits_per_byte"]) for r in rows if "validation_bits_per_byte" in r
  ]
  figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
  axis.plot(*zip(*training), color="0.7", lw=1, label="training batches")
  axis.plot(*zip(*held_out), "o-", color="C0", label="held out")
  for i, (name, value) in enumerate(beside.items()):
    axis.axhline(value, color=f"C{i + 1}", ls="--", lw=1, label=f"{name}: {value:.2f}")
  axis.set(xlabel="update", ylabel="bits per byte", ylim=(1.5, 5))
  axis.legend(frameon=False)
  figure.savefig(path, dpi=150)
  plt.close(figure)
