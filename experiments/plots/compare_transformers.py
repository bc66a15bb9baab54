"""How far mixers are from the same layers of other libraries, with the same weights."""

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
    f"`{name}` of `{row['key']['mixer']}` is zero, as `{row['key']['layer']}` has none."
    for row in rows
    for name in row["metrics"]["missing"]
  )
  key = rows[0]["key"]
  return (
    f"The largest difference over the root mean square of the other side, in float32; batch"
    f" {key['batch']}, {key['length']} tokens, width {key['width']}. Decoding: ours token by token"
    " against their whole sequence; weight gradient: the one that differs most. The other side:"
    f" {', '.join(versions)}. {' '.join(lacking)}\n\n"
    f"{table(['mixer', 'layer', *(name.replace('_', ' ') for name in _ERRORS)], lines)}"
  )
