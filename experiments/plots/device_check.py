"""Table of `device_check`: errors and times of kernels on devices, or interpreted."""

from experiments.lib.tables import table

_HEADER = ["device", "kernel", "inputs", "dtype", "result", "largest error", "of", "ms", "XLA ms"]


def tables(rows: list[dict]) -> str:
  lines, tiles = [], []
  for row in rows:
    key, x = row["key"], row["metrics"]
    if "tiles" in key:
      for kernel, y in x.items():
        shown = "faster" if y["taken"] else "slower" if y["right"] else "wrong results"
        tiles.append([key["device"], kernel, " ".join(map(str, y["tile"])), shown])
      continue
    ms = [
      "–" if x[name] is None else f"{1e3 * x[name]:.2f}" for name in ("seconds", "plain_seconds")
    ]
    error = x["error"] or ("non-finite" if x["worst"] is None else f"{x['worst']:.1e}")
    result = "pass" if x["passes"] else "FAIL" if x["repeats"] is not False else "not deterministic"
    cells = [key["device"], f"`{key['kernel']}`", key["inputs"], key["dtype"], result, error]
    lines.append([*cells, x["of"] or "–", *ms])
  text = (
    "Relative RMS error against the float64 reference, largest of outputs and all gradients; two"
    " runs must be bitwise equal. Interpreted kernels run at small sizes and are not timed.\n\n"
    f"{table(_HEADER, lines)}"
  )
  if tiles:
    text += f"\n{table(['device', 'kernel', 'alternative tile', 'result'], tiles)}"
  return text
