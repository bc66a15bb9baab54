"""Errors of the kernels: by precision of the triangular inverse, and with bfloat16 inputs."""

from experiments.lib.tables import table

_PRECISIONS = ("bf16", "bf16x3", "bf16x6", "substitution")


def _exact(rows):
  """float32 inputs: the largest error by precision."""
  found = {
    (row["key"]["kernel"], row["key"]["keys"], row["key"]["inverse_precision"]): row["metrics"]
    for row in rows
  }
  lines = []
  for kernel, keys in dict.fromkeys((kernel, keys) for kernel, keys, _ in found):
    cells = []
    for precision in _PRECISIONS:
      x = found.get((kernel, keys, precision))
      cells.append(f"{x['max_error']:.1e} (chunk {x['chunk']})" if x else "–")
    lines.append([f"`{kernel}`", keys, *cells])
  return table(["kernel", "keys", *_PRECISIONS], lines)


def _bfloat16(rows):
  """bfloat16 inputs: errors of o, S and the worst gradient."""
  lines = [
    [
      f"`{row['key']['kernel']}`",
      row["key"]["keys"],
      str(row["key"]["head_size"]),
      *(f"{row['metrics'][name]:.1e}" for name in ("o", "S")),
      f"{row['metrics']['gradient']:.1e} ({row['metrics']['worst_gradient']})",
    ]
    for row in rows
  ]
  return table(["kernel", "keys", "head size", "o", "S", "worst gradient"], lines)


def tables(rows: list[dict]) -> str:
  of = lambda dtype: [row for row in rows if row["key"]["dtype"] == dtype]
  text = (
    "Relative RMS error of interpreted kernels; nearly identical keys have beta 1.\n\n"
    f"## float32 inputs\n\nLargest of o, S and all gradients (256 tokens, d = 64).\n\n"
    f"{_exact(of('float32'))}"
  )
  if in_bfloat16 := of("bfloat16"):
    text += f"\n## bfloat16 inputs\n\n512 tokens, default chunk sizes.\n\n{_bfloat16(in_bfloat16)}"
  return text
