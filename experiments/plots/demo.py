"""The demo: validation bits per byte of small models and of n-grams on the same text."""

from matplotlib.figure import Figure

from experiments.lib.tables import table
from experiments.plots import style

# Model -> label, in the order of tables.
NAMES = {
  "bigram": "bigram",
  "trigram": "trigram",
  "transformer": "Transformer++",
  "deltanet": "DeltaNet",
}


def _by_model(rows):
  found = {row["key"]["model"]: row["metrics"] for row in rows}
  return {name: found[name] for name in [*NAMES, *found] if name in found}


def tables(rows: list[dict]) -> str:
  lines = []
  for name, x in _by_model(rows).items():
    count = lambda field: f"{x[field]:,}" if x.get(field) else "–"
    seconds = f"{x['seconds']:.0f}" if x.get("seconds") else "–"
    cells = [NAMES.get(name, name), count("parameters"), count("tokens")]
    lines.append([*cells, seconds, f"{x['bits_per_byte']:.3f}"])
  header = ["model", "parameters", "training bytes", "seconds", "validation bits per byte"]
  return (
    f"Two novels, validated on chapters not trained on; lower is better.\n\n{table(header, lines)}"
  )


def figure(rows: list[dict]) -> Figure | None:
  """Validation bits per byte by update; n-gram models as lines. None without any curve."""
  models = _by_model(rows)
  curves = {name: x["curve"] for name, x in models.items() if x.get("curve")}
  if not curves:
    return None
  drawn, (axes,) = style.panels(1, 1, (5.6, 3.6))
  last = max(step for curve in curves.values() for step, _ in curve)
  axes.set(xlim=(0, 1.32 * last), xlabel="update", ylabel="validation bits per byte")
  axes.set_title("Validation bits per byte, two novels")
  ends = []
  for i, (name, x) in enumerate(models.items()):  # DeltaNet last, on top of the others
    color, bits = style.color(len(models) - 1 - i), x["bits_per_byte"]
    if name in curves:
      axes.plot(*zip(*curves[name]), "o-", color=color, ms=3)
    else:
      axes.plot([0, last], [bits, bits], "--", color=color, lw=1)
    ends.append((last, bits, f"{NAMES.get(name, name)}: {bits:.2f}", color))
  lowest = min(x["bits_per_byte"] for x in models.values())
  highest = max(max(x["bits_per_byte"] for x in models.values()), 1.6 * lowest)
  axes.set_ylim(0.95 * lowest, 1.05 * highest)
  axes.set_xticks([x for x in axes.get_xticks() if 0 <= x <= last])
  style.direct_labels(axes, ends)
  return drawn
