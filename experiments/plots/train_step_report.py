"""Rows of `experiments.pods` as text and as a table."""

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")
_COLUMNS = (
  "config", "target", "mesh", "parts", "remat", "arguments", "over total/ways", "temporaries",
  "total", "of a device", *_KINDS, "model FLOP", "cpu s",
)  # fmt: skip
# A GPU's memory that jax takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_TAKEN = 0.75


def _gb(size):
  return f"{size / 1e9:.2f}"


def _ways(row):
  """Devices that hold one copy of the weights between them."""
  return row["mesh"]["fsdp"] * row["mesh"]["tensor"]


def _excess(row):
  """Bytes of arguments over what an even split would give each device."""
  return row["memory"]["arguments"] * _ways(row) / row["argument_bytes"]


def _verdict(row):
  share = row["memory"]["total"] / row["device_memory"]
  if not row["fits"]:
    return f"DOES NOT FIT: it needs {share:.0%} of the {_gb(row['device_memory'])} GB a device has."
  fraction = ""
  if row["platform"] == "cuda" and share > _TAKEN:
    fraction = " Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: jax takes only 0.75 by itself."
  return f"It fits: {share:.0%} of the {_gb(row['device_memory'])} GB a device has.{fraction}"


def tell(row: dict) -> str:
  """One row in sentences."""
  mesh = " x ".join(f"{axis} {n}" for axis, n in row["mesh"].items())
  lines = [
    f"{row['target']}: {row['devices']} devices, mesh {mesh}",
    f"{row['parameters']:,} parameters; {row['batch']} rows of {row['length']} tokens in"
    f" {row['grad_accum']} parts, loss_chunk {row['loss_chunk']}, remat {row['remat']}",
  ]
  if "error" in row:
    return "\n".join([*lines, f"DOES NOT FIT. The compiler: {row['error']}"])
  products = row["product_flops"]
  by_dtype = "  ".join(f"{dtype} {n:.3g}" for dtype, n in products.items())
  lines += [
    "memory of a device, GB: " + "  ".join(f"{k} {_gb(n)}" for k, n in row["memory"].items()),
    _verdict(row),
    f"arguments: {_excess(row):.3f} x the {_gb(row['argument_bytes'])} GB of weights, moments and"
    f" batch over {_ways(row)} devices",
    "collectives of a device in one update:",
  ]
  for kind, x in row["collectives"].items():
    lines.append(f"  {kind:20}{x['count']:>8,} {_gb(x['bytes']):>10} GB")
  lines += [] if row["collectives"] else ["  none"]
  lines += [
    "kernels: " + ("  ".join(f"{name} {n:,}" for name, n in row["kernels"].items()) or "none"),
    f"FLOP of an update: {row['model_flops']:.3g} of the model (3 x forward);"
    f" {sum(products.values()) * row['devices']:.3g} in products outside kernels, with those that"
    f" remat repeats (each device: {by_dtype})",
    f"lowered in {row['lower_seconds']:.0f} s, compiled in {row['compile_seconds']:.0f} s"
    f" ({row['compile_cpu_seconds']:.0f} s of CPU)",
  ]
  if row["unknown_loops"]:
    lines.append(f"Counted for one round only, their number not found: {row['unknown_loops']}.")
  if row["full_gathers"]:
    lines.append(f"WARNING: {row['full_gathers']} arrays are gathered whole to be split anew.")
  return "\n".join(lines)


def markdown(rows: list[dict]) -> str:
  """A table with a line for each row, sizes in GB."""
  lines = [_COLUMNS, ["---"] * len(_COLUMNS)]
  for row in rows:
    mesh = " ".join(f"{axis} {n}" for axis, n in row["mesh"].items() if n > 1)
    cells = [row["config"], row["target"], mesh, str(row["grad_accum"]), row["remat"]]
    if "error" in row:
      lines.append([*cells, f"does not fit: {row['error']}"])
      continue
    memory = row["memory"]
    share = f"{memory['total'] / row['device_memory']:.0%}"
    moved = (row["collectives"].get(kind, dict(bytes=0))["bytes"] for kind in _KINDS)
    cells += [_gb(memory["arguments"]), f"{_excess(row):.3f}", _gb(memory["temporaries"])]
    cells += [_gb(memory["total"]), share if row["fits"] else f"{share}, does not fit"]
    cells += [*map(_gb, moved), f"{row['model_flops']:.3g}", f"{row['compile_cpu_seconds']:.0f}"]
    lines.append(cells)
  return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
