"""Differences between mixers and the same layers of transformers, with the same weights."""

from experiments.lib.tables import table

_ERRORS = ("output", "decoding", "input_gradient", "weight_gradient")


def tables(rows: list[dict]) -> str:
  lines = []
  for row in rows:
    key, x = row["key"], row["metrics"]
    errors = [f"{x[name]:.1e}" for name in _ERRORS]
    lines.append([f"`{key['mixer']}`", f"`{key['layer']}`", *errors])
  versions = sorted(
    {f"{name} {x}" for row in rows for name, x in row["metrics"]["versions"].items()}
  )
  lacking = sorted(
    f"`{name}` of `{row['key']['mixer']}` is set to zero: `{row['key']['layer']}` lacks it."
    for row in rows
    for name in row["metrics"]["missing"]
  )
  key = rows[0]["key"]
  return (
    "Largest absolute difference relative to the root mean square of the reference, in float32;"
    f" batch size {key['batch']}, {key['length']} tokens, width {key['width']}. Decoding: ours"
    " token by token, the reference over the full sequence. Weight gradient: the one with the"
    f" largest error. Reference: {', '.join(versions)}. {' '.join(lacking)}\n\n"
    f"{table(['mixer', 'layer', *(name.replace('_', ' ') for name in _ERRORS)], lines)}"
  )
