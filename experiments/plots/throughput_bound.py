"""Roofline upper bounds of training throughput from AOT compilation, with the paper's figure."""

from matplotlib.figure import Figure

from experiments.lib.tables import table
from experiments.plots import style
from experiments.plots.throughput import PAPER, PAPER_LENGTHS, TITLES, length_name

_LIMITS = dict(compute="FLOP", hbm="HBM", interconnect="interconnect")


def _found(rows):
  """Machine -> {(model, length): metrics}, models in the order of TITLES."""
  found = {}
  for row in sorted(rows, key=lambda row: list(TITLES).index(row["key"]["model"])):
    key = row["key"]
    found.setdefault(key["target"], {})[key["model"], key["length"]] = row["metrics"]
  return {target: found[target] for target in sorted(found)}


def _by_length(of_machine, cell):
  """A row per model, a cell per length."""
  lines = []
  for name, title in TITLES.items():
    if any(name == model for model, _ in of_machine):
      cells = [of_machine.get((name, n)) for n in PAPER_LENGTHS]
      lines.append([title, *("–" if x is None else cell(x) for x in cells)])
  return lines


def _bound(x):
  if not x["fits"]:
    return "none"
  seconds = x["roofline_seconds"]
  return f"{x['roofline_tokens_per_second']:,.0f} {_LIMITS[max(seconds, key=seconds.get)]}"


def _parts(x):
  """Memory, FLOP and traffic of one device in an update."""
  compiled = sum(x["matmul_flops"].values()) + x["kernel_flops"]
  return [
    f"{x['memory']['total'] / 1e9:.1f}",
    f"{x['model_flops'] / x['devices'] / 1e12:.0f}",
    f"{compiled / 1e12:.0f}",
    f"{x['hbm_bytes'] / 1e9:,.0f}",
    f"{x['interconnect_bytes'] / 1e9:.1f}",
    x["remat"],
  ]


def tables(rows: list[dict]) -> str:
  found = _found(rows)
  lengths = [f"{n:,}" for n in PAPER_LENGTHS]
  text = (
    "AOT-compiled, never run: training updates of 1.3B models, 16,384 tokens per device, weights"
    " sharded over all devices. Roofline upper bound of the throughput, tokens/s per device, and"
    " the resource that sets it: matmul FLOP at the bfloat16 peak, HBM traffic (assuming that no"
    " cache holds an array between two operations), or interconnect traffic, each alone and at the"
    " bandwidth of the data sheet. Bounds are those of this program: another may move less.\n"
  )
  for target, of_machine in found.items():
    lines = _by_length(of_machine, _bound)
    text += f"\n## {target}\n\n{table(['upper bound, tokens/s', *lengths], lines)}"
  paper = [[TITLES[name], *(f"{1000 * x:,.0f}" for x in values)] for name, values in PAPER.items()]
  text += f"\n## Paper, measured on one H100\n\n{table(['tokens/s', *lengths], paper)}"
  header = ["model", "machine", "length", "memory, GB", "model TFLOP", "compiled TFLOP"]
  lines = [
    [TITLES[model], target, f"{length:,}", *_parts(x)]
    for target, of_machine in found.items()
    for (model, length), x in sorted(of_machine.items(), key=lambda y: y[0][1])
    if "memory" in x
  ]
  text += (
    f"\n## One update, per device\n\n{table([*header, 'HBM, GB', 'sent, GB', 'remat'], lines)}\n"
    "Model FLOP: three forward passes. Compiled FLOP: matmuls of the program, including"
    " rematerialization, and those of its kernels by the formulas of the mixers; the scan of Mamba"
    " has no matmuls and counts only as traffic. HBM traffic multiplies loop bodies by their trip"
    " count, counts only the slice of a sliced array, and every input of a kernel once.\n"
  )
  without_bound = [
    f"- {TITLES[model]} on {target}, length {length:,}, remat {x['remat']}:"
    f" {x.get('error', 'needs more memory than a device has')}\n"
    for target, of_machine in found.items()
    for (model, length), x in of_machine.items()
    if not x["fits"]
  ]
  return text + ("\n## No bound\n\n" + "".join(without_bound) if without_bound else "")


def figure(rows: list[dict]) -> Figure:
  found = _found(rows)
  curves = {f"Upper bound, {target}": _curves(of_machine) for target, of_machine in found.items()}
  curves["Paper, one H100, measured"] = {
    name: {n: 1000 * x for n, x in zip(PAPER_LENGTHS, values)} for name, values in PAPER.items()
  }
  drawn, panels = style.panels(len(curves), 2, (4.4, 3.2))
  colors = {name: style.color(i) for i, name in enumerate(TITLES)}
  for panel, (title, of_models) in zip(panels, curves.items()):
    ends, alone = [], []  # labels of single points would cross other lines
    for name, curve in of_models.items():
      values = [x / 1000 for x in curve.values()]
      panel.plot(list(curve), values, "o-", color=colors[name], markersize=3)
      end = (max(curve), values[-1], TITLES[name], colors[name])
      (ends if len(curve) > 1 else alone).append(end)
    style.log_axis(panel.xaxis, list(PAPER_LENGTHS), list(map(length_name, PAPER_LENGTHS)))
    panel.set(title=title, xlabel="sequence length", ylabel="thousand tokens/s per device")
    panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
    panel.set_xlim(PAPER_LENGTHS[0] / (4.4 if alone else 1.2), PAPER_LENGTHS[-1] * 3.2)
    style.direct_labels(panel, ends)
    style.direct_labels(panel, alone, left=True)
  return drawn


def _curves(of_machine):
  """Model -> {length: bound}."""
  curves = {}
  for (name, length), x in sorted(of_machine.items(), key=lambda y: y[0][1]):
    if x["fits"]:
      curves.setdefault(name, {})[length] = x["roofline_tokens_per_second"]
  return curves
