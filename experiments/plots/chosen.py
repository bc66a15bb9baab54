"""Records of a sweep at the best grid point of each row, which the first seed selects."""

import statistics

# Name of a model in keys -> label, in the order of tables.
NAMES = {
  "attention": "softmax attention",
  "hyena": "Hyena",
  "multihead-hyena": "Multihead Hyena",
  "rwkv4": "RWKV-4",
  "retnet": "RetNet",
  "linear-attention": "linear attention",
  "mamba": "Mamba",
  "gla": "GLA",
  "deltanet": "DeltaNet",
}
CONV = "-conv"


def title(model: str) -> str:
  """Label of a model, and whether it has a convolution."""
  name = NAMES[model.removesuffix(CONV)]
  return f"{name}, conv" if model.endswith(CONV) else name


def models(rows: list[dict]) -> list[str]:
  """Models that have records, in the order of NAMES; without convolution first."""
  known = {row["key"]["model"] for row in rows}
  return [x for name in NAMES for x in (name, name + CONV) if x in known]


def runs(
  rows: list[dict],
  fields: tuple[str, ...],
  metric: str,
  *,
  lower: bool = False,
  enough: float = float("inf"),
) -> dict[tuple, list[dict]]:
  """Values of these fields of the key -> evaluations of all seeds at the best grid point.

  Args:
    lower, enough: as in `sweep_spec.Row`.
  """
  groups: dict[tuple, list[dict]] = {}
  for row in rows:
    groups.setdefault(tuple(row["key"][field] for field in fields), []).append(row)
  return {values: _best(group, fields, metric, lower, enough) for values, group in groups.items()}


def _best(group, fields, metric, lower, enough):
  point = lambda row: {
    name: value for name, value in row["key"].items() if name not in (*fields, "seed")
  }
  first = min(row["key"]["seed"] for row in group)
  grid = [row for row in group if row["key"]["seed"] == first]

  def score(row):
    value = row["metrics"]["evaluation"][metric]
    return -value if lower else min(value, enough)

  best = point(max(grid, key=score))
  return [row["metrics"]["evaluation"] for row in group if point(row) == best]


def cell(values: list[float]) -> str:
  """Median of the seeds in percent, with minimum and maximum if they differ."""
  if not values:
    return "–"
  low, middle, high = (
    f"{100 * x:.1f}" for x in (min(values), statistics.median(values), max(values))
  )
  return middle if low == high else f"{middle} ({low} to {high})"


def percent(value: float | None) -> str:
  return "–" if value is None else f"{value:g}"
