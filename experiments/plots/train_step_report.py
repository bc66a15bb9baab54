"""The training step on machines that are not here: memory, and what devices send each other."""

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
  # Devices that hold one copy of the weights between them.
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
  memory = ["arguments", "over an even split", "temporaries", "total", "of a device"]
  traffic = [*_KINDS, "other", "FLOP of the model"]
  refused = [
    f"- {_name(key)}, mesh {key['mesh']}, {key['grad_accum']} micro-batches, remat {key['remat']}:"
    f" {row['metrics']['error']}\n"
    for row in rows
    for key in [row["key"]]
    if "error" in row["metrics"]
  ]
  return (
    "## Memory of one device, GB\n\n"
    f"{table(case + memory, [_case(key) + _memory(x) for key, x in compiled])}\n"
    "Arguments are weights, moments and batch.\n\n"
    "## Collectives of one device in one update, GB\n\n"
    f"{table(case + traffic, [_case(key) + _traffic(x) for key, x in compiled])}\n"
    "The larger of operand and result. FLOP: three times the forward, of all devices together.\n"
    + ("\n## Refused by the compiler\n\n" + "".join(refused) if refused else "")
  )


def figure(rows: list[dict]) -> Figure:
  """Memory of a device as a share of what it has."""
  found = [(row["key"], row["metrics"]) for row in rows if "error" not in row["metrics"]]
  drawn, (axes,) = style.panels(1, 1, (8.0, 0.6 + 0.28 * len(found)))
  places = range(len(found))
  names = []
  for key, _ in found:
    name, mesh, micro_batches, remat = _case(key)
    names.append(f"{name} · {mesh} · {micro_batches} × {remat}")
  share = lambda part: [100 * x["memory"][part] / x["device_memory"] for _, x in found]
  arguments, temporaries = share("arguments"), share("temporaries")
  axes.barh(places, arguments, color=style.colour(0), label="weights, moments, batch")
  axes.barh(places, temporaries, left=arguments, color=style.colour(1), label="temporaries")
  for i, total in enumerate(share("total")):
    axes.text(total + 1, i, f"{total:.0f} %", va="center", fontsize=8)
  axes.set_yticks(places, names)
  axes.axvline(100, color="0.3", lw=1)
  axes.set(
    xlabel="% of a device's memory",
    title="Does one update fit? model · mesh · micro-batches × remat",
  )
  axes.invert_yaxis()
  axes.grid(visible=False, axis="y")
  axes.legend(loc="lower right")
  return drawn
