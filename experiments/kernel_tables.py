"""The tables of pallas_kernels/README.md from the rows of a kernel report.

python -m experiments.kernel_tables < experiments/results/kernel_report.jsonl
"""

import json
import sys

_TPUS, _GPUS = ("v5e", "v6e", "v5p"), ("h100", "a100")
_SIZES = (64, 128, 256)


def _table(header, lines):
  lines = [header, ["---"] * len(header), *lines]
  return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cell(rows, show, **wanted):
  found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
  if not found:
    return "–"
  (row,) = found
  return show(row) if row["compiles"] else "fails"


def _number(x):
  return f"{x:.2f}" if x < 50 else f"{x:.0f}"


def tpu_table(rows: list[dict]) -> str:
  """Bundles per token and head on each chip, plain inputs, and bytes over the least at 128."""
  rows = [row for row in rows if row["target"] in _TPUS and row["inputs"] == "plain"]
  bundles = lambda row: _number(row["bundles_per_token_head"])
  lines = []
  for program, dtype in dict.fromkeys((row["program"], row["dtype"]) for row in rows):
    case = dict(program=program, dtype=dtype)
    cells = [
      " / ".join(_cell(rows, bundles, target=x, head_size=d, **case) for x in _TPUS) for d in _SIZES
    ]
    moved = _cell(rows, _moved, target="v5e", head_size=128, **case)
    lines.append([program, dtype, *cells, moved])
  return _table(["program", "dtype", *(f"d = {d}" for d in _SIZES), "bytes/min, d = 128"], lines)


def gpu_table(rows: list[dict]) -> str:
  """Registers, spilled bytes and KiB of shared memory, full inputs; the worst spill of plain."""
  rows = [row for row in rows if row["target"] in _GPUS]
  full = [row for row in rows if row["inputs"] == "full"]
  lines = []
  for program, kernel, dtype in dict.fromkeys(
    (row["program"], row["kernel"], row["dtype"]) for row in full
  ):
    case = dict(program=program, kernel=kernel, dtype=dtype)
    cells = [
      _cell(full, _resources, target=target, head_size=d, **case)
      for target in _GPUS
      for d in _SIZES
    ]
    plain = max(
      row["spill_bytes"]
      for row in rows
      if row["inputs"] == "plain" and all(row[key] == value for key, value in case.items())
    )
    moved = _cell(full, _moved, target="h100", head_size=128, **case)
    lines.append([f"{program}: `{kernel}`", dtype, *cells, str(plain), moved])
  sizes = [f"{target.upper()} {d}" for target in _GPUS for d in _SIZES]
  return _table(["kernel", "dtype", *sizes, "plain, worst spill", "bytes/min"], lines)


def _moved(row):
  return f"{row['bytes_over_minimum']:.2f}"


def _resources(row):
  return f"{row['registers']} / {row['spill_bytes']} / {row['shared_bytes'] // 1024}"


if __name__ == "__main__":
  rows = [json.loads(line) for line in sys.stdin]
  print(tpu_table(rows))
  print(gpu_table(rows))
