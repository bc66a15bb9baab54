"""The training step, AOT-compiled: memory per device and collectives."""

from matplotlib.figure import Figure

from experiments.lib.tables import table
from experiments.plots import style

_KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def _gb(size):
  return f"{size / 1e9:.2f}"


def _name(key):
  return f"{key['config']} on {key['target']}"


def _case(key):
  return [_name(key), key["mesh"] or "one device", str(key["grad_accum"]), key["remat"]]


def _memory(x):
  # Number of devices over which one copy of the weights is sharded.
  ways = x["mesh"]["fsdp"] * x["mesh"]["tensor"]
  even = x["memory"]["arguments"] * ways / x["argument_bytes"]
  share = f"{x['memory']['total'] / x['device_memory']:.0%}"
  shown = [_gb(x["memory"]["arguments"]), f"{even:.3f}", _gb(x["memory"]["temporaries"])]
  return [*shown, _gb(x["memory"]["total"]), share + ("" if x["fits"] else ", does not fit")]


def _traffic(x):
  moved = {kind: y["bytes"] for kind, y in x["collectives"].items()}
  shown = [_gb(moved.pop(kind, 0)) for kind in _KINDS]
  return [*shown, _gb(sum(moved.values())), f"{x['model_flops']:.3g}"]


def tables(rows: list[dict]) -> str:
  compiled = [(row["key"], row["metrics"]) for row in rows if "error" not in row["metrics"]]
  case = ["model and machine", "mesh", "micro-batches", "remat"]
  memory = ["arguments", "relative to even sharding", "temporaries", "total", "of device memory"]
  traffic = [*_KINDS, "other", "model FLOP"]
  failed = [
    f"- {_name(key)}, mesh {key['mesh']}, {key['grad_accum']} micro-batches, remat {key['remat']}:"
    f" {row['metrics']['error']}\n"
    for row in rows
    for key in [row["key"]]
    if "error" in row["metrics"]
  ]
  return (
    "## Memory per device, GB\n\n"
    f"{table(case + memory, [_case(key) + _memory(x) for key, x in compiled])}\n"
    "Arguments: weights, optimizer moments and batch.\n\n"
    "## Collectives per device and update, GB\n\n"
    f"{table(case + traffic, [_case(key) + _traffic(x) for key, x in compiled])}\n"
    "The larger of operand and result. Model FLOP: three forward passes, of all devices.\n"
    + ("\n## Does not compile\n\n" + "".join(failed) if failed else "")
  )


def figure(rows: list[dict]) -> Figure:
  """Memory of an update as a percentage of the memory of a device."""
  found = [(row["key"], row["metrics"]) for row in rows if "error" not in row["metrics"]]
  drawn, (axes,) = style.panels(1, 1, (8.0, 0.6 + 0.28 * len(found)))
  positions = range(len(found))
  names = []
  for key, _ in found:
    name, mesh, micro_batches, remat = _case(key)
    names.append(f"{name} · {mesh} · {micro_batches} × {remat}")
  share = lambda part: [100 * x["memory"][part] / x["device_memory"] for _, x in found]
  arguments, temporaries = share("arguments"), share("temporaries")
  axes.barh(positions, arguments, color=style.color(0), label="weights, optimizer moments, batch")
  axes.barh(positions, temporaries, left=arguments, color=style.color(1), label="temporaries")
  for i, total in enumerate(share("total")):
    axes.text(total + 1, i, f"{total:.0f} %", va="center", fontsize=8)
  axes.set_yticks(positions, names)
  axes.axvline(100, color="0.3", lw=1)
  axes.set(
    xlabel="% of device memory",
    ylabel="model on machine · mesh · micro-batches × remat",
    title="Memory of one update",
  )
  axes.invert_yaxis()
  axes.grid(visible=False, axis="y")
  axes.legend(loc="lower right", frameon=True, framealpha=1, edgecolor="none")
  return drawn
