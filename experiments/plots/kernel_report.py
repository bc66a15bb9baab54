"""The tables of pallas_kernels/README.md from the rows of a kernel report.

python -m experiments.kernel_tables < experiments/results/kernel_report.jsonl
"""

import json
import sys

_TPUS = ("v5e", "v6e", "v5p")
_SIZES = ((64, 64), (128, 128), (256, 256), (256, 512))  # keys, values
_GPU_COLUMNS = [
  *(("h100", size) for size in _SIZES),
  *(("a100", size) for size in _SIZES[:3]),
  ("b200", (128, 128)),
]


def _table(header, lines):
  lines = [header, ["---"] * len(header), *lines]
  return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _matching(rows, **wanted):
  return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _cell(rows, show, size, **wanted):
  found = _matching(rows, head_size=size[0], value_size=size[1], **wanted)
  if not found:
    return "–"
  (row,) = found
  return show(row) if row["compiles"] else "fails"


def _size(size):
  dk, dv = size
  return f"{dk}" if dk == dv else f"{dk} × {dv}"


def tpu_table(rows: list[dict]) -> str:
  """Bundles per token and head on each chip, plain inputs; the most VMEM; bytes over the least."""
  rows = [row for row in rows if row["target"] in _TPUS]
  bundles = lambda row: f"{row['bundles_per_token_head']:.3g}"
  lines = []
  for program, dtype, chunk in dict.fromkeys(
    (row["program"], row["dtype"], row["chunk"]) for row in rows
  ):
    case = dict(program=program, dtype=dtype, chunk=chunk)
    plain = _matching(rows, inputs="plain", **case)
    cells = [" / ".join(_cell(plain, bundles, d, target=x) for x in _TPUS) for d in _SIZES]
    vmem = max(row.get("vmem_bytes", 0) for row in _matching(rows, **case))
    moved = _cell(plain, _moved, (128, 128), target="v5e")
    lines.append([program, dtype, str(chunk or ""), *cells, f"{vmem / 2**20:.1f}", moved])
  sizes = [f"d = {_size(d)}" for d in _SIZES]
  header = ["program", "dtype", "chunk", *sizes, "VMEM, MiB", "bytes/min, d = 128"]
  return _table(header, lines)


def gpu_table(rows: list[dict]) -> str:
  """Registers, spilled bytes and KiB of shared memory, full inputs; the worst spill of plain."""
  rows = [row for row in rows if row["target"] not in _TPUS]
  full = _matching(rows, inputs="full")
  lines = []
  for program, kernel, dtype in dict.fromkeys(
    (row["program"], row["kernel"], row["dtype"]) for row in full
  ):
    case = dict(program=program, kernel=kernel, dtype=dtype)
    cells = [_cell(full, _resources, d, target=x, **case) for x, d in _GPU_COLUMNS]
    plain = max(row.get("spill_bytes", 0) for row in _matching(rows, inputs="plain", **case))
    moved = _cell(full, _moved, (128, 128), target="h100", **case)
    lines.append([f"{program}: `{kernel}`", dtype, *cells, str(plain), moved])
  columns = [f"{target.upper()} {_size(size)}" for target, size in _GPU_COLUMNS]
  return _table(["kernel", "dtype", *columns, "plain, worst spill", "bytes/min"], lines)


def error_table(rows: list[dict]) -> str:
  """The largest error of each precision, of o, S and all gradients."""
  precisions = dict.fromkeys(row["inverse_precision"] for row in rows)
  lines = []
  for kernel, keys in dict.fromkeys((row["kernel"], row["keys"]) for row in rows):
    cells = []
    for precision in precisions:
      (row,) = _matching(rows, kernel=kernel, keys=keys, inverse_precision=precision)
      cells.append(f"{row['error']:.1e} (chunk {row['chunk']})")
    lines.append([f"`{kernel}`", keys, *cells])
  return _table(["kernel", "keys", *precisions], lines)


def _moved(row):
  return f"{row['bytes_over_minimum']:.2f}"


def _resources(row):
  return f"{row['registers']} / {row['spill_bytes']} / {row['shared_bytes'] // 1024}"


if __name__ == "__main__":
  found = [json.loads(line) for line in sys.stdin]
  counts = [row for row in found if "target" in row]
  print(tpu_table(counts))
  print(gpu_table(counts))
  print(error_table([row for row in found if "target" not in row]))
