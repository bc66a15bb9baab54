"""HBM traffic of one mixer layer on chips that are not here."""

from experiments.lib.tables import table


def _cells(metrics):
  """Of one pass: all that is moved, and what its kernels move."""
  if metrics is None:
    return ["–", "–"]
  if metrics["error"]:
    return ["does not compile", "–"]
  loops = f", {metrics['unknown_trip_counts']} loops once" if metrics["unknown_trip_counts"] else ""
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
  header = ["preset", "mixer", "target", "tokens", "forward", "of that kernels"]
  return (
    "HBM traffic of the compiled layer over the bytes of its input in bfloat16, loops as often as"
    " they run.\n\n"
    f"{table([*header, 'forward + backward', 'of that kernels'], lines)}"
  )
