"""Decoding at growing context length: tokens/s and state size of DeltaNet and Transformer++."""

from matplotlib.figure import Figure

from experiments.lib.tables import table
from experiments.plots import style

_LABELS = {"deltanet-tiny": "DeltaNet", "transformer-tiny": "Transformer++"}


def _presets(rows):
  """Preset -> (context, metrics), shortest context first."""
  found = {}
  for row in rows:
    found.setdefault(row["key"]["preset"], []).append((row["key"]["context"], row["metrics"]))
  return {name: sorted(x, key=lambda pair: pair[0]) for name, x in found.items()}


def _shape(rows):
  key = rows[0]["key"]
  return f"width {key['width']}, depth {key['depth']}, batch size {key['batch']}"


def tables(rows: list[dict]) -> str:
  lines = []
  for name, points in _presets(rows).items():
    for context, x in points:
      ratio = x["tokens_per_second"] / points[0][1]["tokens_per_second"]
      process = "–" if x["process_bytes"] is None else f"{x['process_bytes'] / 1e6:.2f}"
      megabytes = [f"{x[field] / 1e6:.2f}" for field in ("state_bytes", "program_bytes")]
      speed = f"{x['tokens_per_second']:.0f}"
      lines.append([name, f"{context:,}", speed, f"{ratio:.2f}", *megabytes, process])
  header = ["model", "context", "tokens/s", "relative to shortest", "state, MB", "program, MB"]
  return (
    f"Models of {_shape(rows)}. Program: memory of the compiled loop without the weights; process:"
    " increase of the peak resident memory while decoding the context.\n\n"
    f"{table([*header, 'process, MB'], lines)}"
  )


def figure(rows: list[dict]) -> Figure:
  drawn, axes = style.panels(2, 2, (4.0, 3.0))
  shown = (
    ("tokens_per_second", "Tokens per second", 1, (30, 100, 300, 1000, 3000)),
    ("state_bytes", "Decode state, MB", 1e6, (0.1, 1, 10, 100)),
  )
  for panel, (field, title, unit, ticks) in zip(axes, shown):
    ends = []
    for i, (name, points) in enumerate(_presets(rows).items()):
      values = [x[field] / unit for _, x in points]
      panel.plot([context for context, _ in points], values, "o-", color=style.color(i))
      label = _LABELS.get(name, name)
      ends.append((points[-1][0], values[-1], label, style.color(i)))
    contexts = sorted({row["key"]["context"] for row in rows})
    style.log_axis(panel.xaxis, contexts, [f"{x:,}" for x in contexts])
    style.log_axis(panel.yaxis, ticks, [f"{x:,g}" for x in ticks])
    panel.set(title=title, xlabel="context length (tokens)")
    panel.set_xlim(contexts[0] / 1.5, contexts[-1] * 12)
    style.direct_labels(panel, ends)
  drawn.suptitle(f"{_shape(rows)}, {rows[0]['provenance']['machine']}", fontsize=8, color="0.4")
  return drawn
