"""Static resource usage of the kernels, AOT-compiled: a table for each chip."""

import re

from deltanet_jax.chips import CHIPS
from experiments.lib.tables import table

_TARGETS = ("v5e", "v6e", "v5p", "h100", "a100", "b200")
_PROGRAMS = (
  "forward",
  "forward with residuals",
  "backward",
  "UT forward",
  "UT backward",
  "UT jax-triton",
  "step",
  "linear attention forward",
  "linear attention forward with residuals",
  "linear attention backward",
  "linear attention step",
  "short conv forward",
  "short conv backward",
  "qkv conv forward",
  "qkv conv backward",
  "head norm forward",
  "head norm backward",
  "attention forward",
  "attention backward",
  "rope",
)
_INPUTS = ("plain", "full", "per_channel_full")
# Without gate or per head, and per channel; each with the fewest inputs, and with all.
_PAIRS = (("plain", "full"), ("per_channel", "per_channel_full"))
_SIZES = ((64, 64), (128, 128), (256, 256), (256, 512))  # dk, dv


def _size(size):
  dk, dv = size
  return f"d = {dk}" if dk == dv else f"d = {dk} × {dv}"


def _matching(rows, **wanted):
  return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _cell(rows, show, size):
  found = _matching(rows, head_size=size[0], value_size=size[1])
  if not found:
    return "–"
  (row,) = found
  return show(row) if row["compiles"] else "fails"


def _moved(row):
  return f"{row['hbm_over_minimum']:.2f}"


def _cases(rows, *fields):
  """Distinct values of these fields, in the order of _PROGRAMS."""
  found = dict.fromkeys(tuple(row[field] for field in fields) for row in rows)
  return sorted(found, key=lambda case: _PROGRAMS.index(case[0]))


def bundles(row: dict) -> str:
  """VLIW bundles per token and head; for a kernel with loops, of one iteration of each."""
  if row["bundles_per_token_head"] is not None:
    return f"{row['bundles_per_token_head']:.3g}"
  return " / ".join(f"{n:,}" for n in row["bundles_per_loop_iteration"])


def tpu_table(rows: list[dict]) -> str:
  """Bundles per token and head with plain inputs, largest VMEM of any case, HBM traffic."""
  lines = []
  for program, dtype, chunk in _cases(rows, "program", "dtype", "chunk"):
    every = _matching(rows, program=program, dtype=dtype, chunk=chunk)
    plain = _matching(every, inputs="plain")
    cells = [_cell(plain, bundles, size) for size in _SIZES]
    vmem = max(row.get("vmem_bytes", 0) for row in every)
    moved = _cell(plain, _moved, (128, 128))
    lines.append([program, dtype, str(chunk or "–"), *cells, f"{vmem / 2**20:.1f}", moved])
  return table(
    ["program", "dtype", "chunk", *map(_size, _SIZES), "VMEM, MiB", "HBM / minimum"], lines
  )


def inputs_table(rows: list[dict]) -> str:
  """Bundles per token and head by inputs, d = 128, chunks of 128."""
  rows = [row for row in rows if row["chunk"] in (128, None)]
  lines = []
  for program, dtype in _cases(rows, "program", "dtype"):
    every = _matching(rows, program=program, dtype=dtype)
    cells = [_cell(_matching(every, inputs=x), bundles, (128, 128)) for x in _INPUTS]
    lines.append([program, dtype, *cells])
  return table(["program", "dtype", *_INPUTS], lines)


def heads_table(rows: list[dict]) -> str:
  """Bundles per token and head by number of heads: batch size 16, bfloat16, d = 128."""
  rows = _matching(rows, dtype="bfloat16", head_size=128, value_size=128, inputs="plain", chunk=128)
  heads = sorted({row["heads"] for row in rows})
  lines = []
  for target, program in dict.fromkeys((row["target"], row["program"]) for row in rows):
    found = {row["heads"]: row for row in _matching(rows, target=target, program=program)}
    if len(found) > 1:
      cells = [bundles(found[n]) if n in found else "–" for n in heads]
      lines.append([f"{target} {program}", *cells])
  return table(["program", *(f"H = {n}" for n in heads)], lines) if lines else ""


def gpu_table(rows: list[dict], few: str, all_: str) -> str:
  """Registers, spilled bytes and KiB of shared memory with all inputs; largest spill with few."""
  rows = [row for row in rows if row["inputs"] in (few, all_)]
  show = lambda row: f"{row['registers']} / {row['spill_bytes']} / {row['shared_bytes'] // 1024}"
  lines = []
  for program, kernel, dtype, chunk in _cases(rows, "program", "kernel", "dtype", "chunk"):
    every = _matching(rows, program=program, kernel=kernel, dtype=dtype, chunk=chunk)
    full = _matching(every, inputs=all_)
    cells = [_cell(full, show, d) for d in _SIZES]
    plain = max((x.get("spill_bytes", 0) for x in _matching(every, inputs=few)), default=0)
    moved = _cell(full, _moved, (128, 128))
    lines.append([f"{program}: `{kernel}`", dtype, str(chunk or "–"), *cells, str(plain), moved])
  sizes = [_size(d) for d in _SIZES]
  return table(
    ["kernel", "dtype", "chunk", *sizes, f"{few}, largest spill", "HBM / minimum"], lines
  )


def _shapes(row):
  """Shapes of the matmul instructions; those of tcgen05 are in a descriptor."""
  names = (re.search(r"m\d+n\d+(?=k)|tcgen05", kind)[0] for kind in row["matmul_instructions"])
  return " ".join(sorted(dict.fromkeys(names)))


def tile_table(rows: list[dict], few: str, all_: str) -> str:
  """Tile, resource usage and occupancy of each GPU kernel at d = 128, with few / all inputs."""

  def both(show, plain, full):
    cells = [show(plain), show(full)]
    return cells[0] if cells[0] == cells[1] else " / ".join(cells)

  lines = []
  rows = [row for row in _matching(rows, head_size=128, value_size=128) if row.get("waves")]
  for target in _TARGETS:
    mine = _matching(rows, target=target)
    for program, kernel, dtype in _cases(mine, "program", "kernel", "dtype"):
      found = _matching(mine, program=program, kernel=kernel, dtype=dtype)
      pair = [_matching(found, inputs=inputs) for inputs in (few, all_)]
      if not all(pair):
        continue
      (plain,), (full,) = pair
      cell = lambda field, form="": both(lambda row: f"{row[field]:{form}}", plain, full)
      # Convolutions choose their tile themselves.
      shown = lambda row: "{} × {}, {}, {}".format(*row["tile"]) if row["tile"] else "–"
      tile = both(shown, plain, full)
      name = f"{target.upper()} `{kernel.removeprefix('delta_rule_')}` {dtype}"
      cells = [cell(field) for field in ("registers", "spill_bytes", "barriers", "async_copies")]
      cells += [both(_shapes, plain, full), cell("blocks_per_sm"), cell("waves", ".2f")]
      lines.append([name, tile, *cells])
  header = ["kernel", "tile, warps, stages", "registers", "spilled bytes", "barriers"]
  header += ["async copies", "matmul instructions", "occupancy, blocks per SM", "waves"]
  return table(header, lines)


def tables(rows: list[dict]) -> str:
  rows = [dict(heads=16) | row["key"] | row["metrics"] for row in rows]
  failed = sum(not row["compiles"] for row in rows)
  verdict = f"{failed} of them do not compile" if failed else "all of them compile"
  text = (
    f"{len(rows)} kernels at different shapes; {verdict}. HBM / minimum: HBM traffic of a kernel at"
    " d = 128, relative to the minimum of its pass (the kernels of one pass add up).\n"
  )
  for target in _TARGETS:
    mine = _matching(rows, target=target, heads=16)
    if not mine:
      continue
    if CHIPS[target].platform == "tpu":
      what = (
        "Plain inputs: static VLIW bundles per token and head (a decode step: per head), and the"
        " largest VMEM of any case. Then by inputs at d = 128: full has a per-head gate, S0 and"
        " segments; per_channel_full has a per-channel gate instead."
      )
      shown = f"{tpu_table(mine)}\n{inputs_table(mine)}"
    else:
      what = (
        "With per-head gate, S0 and segments: registers / spilled bytes / shared memory in KiB; the"
        " largest spill with plain inputs. Then the same with a per-channel gate."
      )
      shown = "\n".join(gpu_table(mine, *pair) for pair in _PAIRS)
    text += f"\n## {target.upper() if CHIPS[target].platform == 'gpu' else target}\n\n{what}\n\n"
    text += shown
  if heads := heads_table(rows):
    text += (
      "\n## Heads on TPU\n\nVLIW bundles per token and head, batch size 16, length 2048, bfloat16,"
      f" d = 128.\n\n{heads}"
    )
  text += (
    "\n## Tiles of the GPU kernels\n\nd = 128, plain / full inputs (one number if both are equal):"
    " the tile of keys × values (of attention: queries × keys), static instruction counts (loop"
    " bodies count once), occupancy (blocks per SM), and waves: blocks of batch size 8, length 2048"
    " and 16 heads divided by the blocks that the chip holds at once. Then the same with"
    " per-channel gates, alone / with S0 and segments.\n\n"
  )
  return text + "\n".join(tile_table(rows, *pair) for pair in _PAIRS)
