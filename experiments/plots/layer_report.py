"""HBM traffic of one mixer layer, AOT-compiled."""

from experiments.lib.tables import table


def _cells(metrics):
  """HBM traffic of one pass, and the part of its kernels."""
  if metrics is None:
    return ["–", "–"]
  if metrics["error"]:
    return ["does not compile", "–"]
  loops = (
    f", {metrics['unknown_trip_counts']} loops counted once"
    if metrics["unknown_trip_counts"]
    else ""
  )
  kernels = sum(metrics["kernel_hbm_over_input"].values())
  return [f"{metrics['hbm_over_input']:.1f}{loops}", f"{kernels:.1f}"]


def tables(rows: list[dict]) -> str:
  found = {}
  for row in rows:
    key = row["key"]
    tokens = f"{key['batch']} x {key['length']}" + (", segments" if key.get("segments") else "")
    name = (key["preset"], key["mixer"], key["target"], tokens)
    found.setdefault(name, {})[key["backward"]] = row["metrics"]
  lines = [
    [*name, *_cells(passes.get(False)), *_cells(passes.get(True))] for name, passes in found.items()
  ]
  header = ["preset", "mixer", "target", "tokens", "forward", "of which kernels"]
  return (
    "HBM traffic of the compiled layer, relative to the bytes of its input in bfloat16. Loop bodies"
    " count as often as they run.\n\n"
    f"{table([*header, 'forward + backward', 'of which kernels'], lines)}"
  )
