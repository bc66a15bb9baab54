"""Kernels checked and timed on devices, or interpreted."""

from experiments.lib.tables import table

_HEADER = ["device", "kernel", "inputs", "dtype", "result", "largest error", "of", "ms", "plain ms"]


def tables(rows: list[dict]) -> str:
  lines, tiles = [], []
  for row in rows:
    key, x = row["key"], row["metrics"]
    if "tiles" in key:
      for kernel, y in x.items():
        shown = "taken" if y["taken"] else "left" if y["right"] else "wrong"
        tiles.append([key["device"], kernel, " ".join(map(str, y["tile"])), shown])
      continue
    ms = [
      "–" if x[name] is None else f"{1e3 * x[name]:.2f}" for name in ("seconds", "plain_seconds")
    ]
    error = x["error"] or ("not finite" if x["worst"] is None else f"{x['worst']:.1e}")
    result = "pass" if x["passes"] else "FAIL" if x["repeats"] is not False else "bits differ"
    cells = [key["device"], f"`{key['kernel']}`", key["inputs"], key["dtype"], result, error]
    lines.append([*cells, x["of"] or "–", *ms])
  text = (
    "Relative RMS error against the float64 definition, worst of outputs and all gradients; a"
    " program runs twice, and its bits must be equal. Interpreted, at small sizes, there are no"
    " times.\n\n"
    f"{table(_HEADER, lines)}"
  )
  if tiles:
    text += f"\n{table(['device', 'kernel', 'other tile', 'result'], tiles)}"
  return text
