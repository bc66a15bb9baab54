"""Gradients of an ensemble: `jax.vmap` compared with a loop over its members."""

from experiments.lib.tables import table


def tables(rows: list[dict]) -> str:
  lines = []
  for row in rows:
    key, x = row["key"], row["metrics"]
    times = [f"{1e3 * x[name]:.0f}" for name in ("loop", "vmap")]
    lines.append([key["of"], str(key["members"]), *times, f"{x['ratio']:.2f}"])
  header = ["model", "members", "loop, ms", "vmap, ms", "vmap / loop"]
  return (
    "The operator at length 2,048 with 4 heads of 64, and tiny models on 4 x 256 tokens.\n\n"
    f"{table(header, lines)}"
  )
