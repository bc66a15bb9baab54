"""HBM traffic of one mixer layer on chips that are not here."""

from experiments.lib.tables import table


def _cells(figures):
  """Of one pass: all that is moved, and what its kernels move."""
  if figures is None:
    return ["–", "–"]
  if figures["error"]:
    return ["does not compile", "–"]
  loops = f", {figures['loops']} loops once" if figures["loops"] else ""
  kernels = sum(figures["kernels_over_input"].values())
  return [f"{figures['over_input']:.1f}{loops}", f"{kernels:.1f}"]


def tables(rows: list[dict]) -> str:
  found = {}
  for row in rows:
    key = row["key"]
    tokens = f"{key['batch']} x {key['length']}" + (", documents" if key.get("documents") else "")
    name = (key["preset"], key["mixer"], key["target"], tokens)
    found.setdefault(name, {})[key["backward"]] = row["figures"]
  lines = [
    [*name, *_cells(passes.get(False)), *_cells(passes.get(True))] for name, passes in found.items()
  ]
  header = ["preset", "mixer", "target", "tokens", "forward", "of that kernels"]
  return (
    "HBM traffic of the compiled layer over the bytes of its input in bfloat16, loops as often as"
    " they run.\n\n"
    f"{table([*header, 'forward + backward', 'of that kernels'], lines)}"
  )
