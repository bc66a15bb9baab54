"""Errors of the kernels with every precision of their inverse."""

from experiments.lib.tables import table

_PRECISIONS = ("bf16", "bf16x3", "bf16x6", "substitution")


def tables(rows: list[dict]) -> str:
  found = {tuple(row["key"].values()): row["figures"] for row in rows}
  lines = []
  for kernel, keys in dict.fromkeys((kernel, keys) for kernel, keys, _ in found):
    cells = []
    for precision in _PRECISIONS:
      x = found.get((kernel, keys, precision))
      cells.append(f"{x['error']:.1e} (chunk {x['chunk']})" if x else "–")
    lines.append([f"`{kernel}`", keys, *cells])
  return (
    "Relative RMS error, float32 inputs, interpreted, worst of o, S and all gradients (256 tokens,"
    " d = 64; nearly identical keys have beta 1).\n\n"
    f"{table(['kernel', 'keys', *_PRECISIONS], lines)}"
  )
