"""Plot the metrics of one or several training runs to a PNG file.

  python -m experiments.plot_run --workdir=RUN
  python -m experiments.plot_run --workdir=A --workdir=B --out=compare.png
  python -m experiments.plot_run --workdir=RUN --metric=validation_accuracy --metric=mfu

Panels: loss (training and validation), learning rate, gradient norm, throughput, and each --metric.
The command reads metrics.jsonl only, so the runs may be training.
"""

from experiments.lib import early_signals  # noqa: F401, before what takes seconds to import

# isort: split
import json
import pathlib

from absl import flags

from deltanet_jax._extras import MissingExtraError
from deltanet_jax.files import as_path, replacing, writing
from deltanet_jax.train.loggers import JSON_LINES
from experiments.lib import app

_WORKDIRS = flags.DEFINE_multi_string("workdir", [], "Folder of a run; repeatable.")
_METRICS = flags.DEFINE_multi_string(
  "metric", [], "Also plot this metric of metrics.jsonl, in a panel of its own; repeatable."
)
_OUT = flags.DEFINE_string(
  "out", None, "PNG file to write; metrics.png in the folder of the first run by default."
)

# Panel title -> metrics in it, the first of them as a thin line.
_PANELS = {
  "loss (nats per token)": ("loss", "validation_loss"),
  "learning rate": ("learning_rate",),
  "gradient norm": ("grad_norm",),
  "throughput (tokens/s)": ("tokens_per_second",),
}


def read(workdir: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
  """Return the (step, value) pairs of each metric of a run; non-finite values are left out."""
  path = workdir / JSON_LINES
  if not path.exists():
    raise ValueError(f"{workdir} has no {JSON_LINES}: expected the folder of a training run.")
  curves: dict[str, list[tuple[int, float]]] = {}
  for line in path.read_text().splitlines():
    try:
      values = json.loads(line)
      step = values.pop("step")
    except (ValueError, KeyError):  # the last line of a run that is being written
      continue
    for name, value in values.items():
      if value is not None:
        curves.setdefault(name, []).append((step, value))
  return curves


def figure(runs: dict[str, dict[str, list[tuple[int, float]]]], more: tuple[str, ...] = ()):
  """Draw one panel per metric, one color per run.

  Args:
    runs: the curves of each run (see `read`), by the name to show.
    more: metrics that get a panel of their own.
  """
  from experiments.plots import style

  panels = _PANELS | {name: (name,) for name in more}
  drawn, axes = style.panels(len(panels), 2, (5.0, 2.8))
  for panel, (title, metrics) in zip(axes, panels.items()):
    for i, (name, curves) in enumerate(runs.items()):
      for metric in metrics:
        if points := curves.get(metric):
          validation = metric.startswith("validation")
          label = f"{name}, validation" if validation else name
          look = dict(marker="o") if validation else dict(linewidth=1.0, alpha=0.8)
          panel.plot(*zip(*points), color=style.color(i % 9), label=label, **look)
    panel.set(title=title, xlabel="update")
    if not panel.lines:
      panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", color="0.5")
    if panel.lines and (len(runs) > 1 or len(panel.lines) > 1):
      panel.legend()
  return drawn


def main():
  workdirs = [as_path(x) for x in _WORKDIRS.value]
  if not workdirs:
    raise ValueError("--workdir is needed: the folder of a run; see --help.")
  unique = len({x.resolve().name for x in workdirs}) == len(workdirs)
  runs = {x.resolve().name if unique else str(x): read(x) for x in workdirs}
  known = sorted(set().union(*runs.values()))
  for name in _METRICS.value:
    if name not in known:
      raise ValueError(f"--metric is {name!r}, but the runs have {known}.")
  out = as_path(_OUT.value) if _OUT.value else workdirs[0] / "metrics.png"
  with writing(out.parent), replacing(out) as new:
    figure(runs, tuple(_METRICS.value)).savefig(new, dpi=150, format=out.suffix[1:] or "png")
  print(f"wrote {out}")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, MissingExtraError))
