"""Scoring four continuations of a context with a shared prefill, compared with separate ones."""

from experiments.lib.tables import table


def tables(rows: list[dict]) -> str:
  lines = []
  for row in rows:
    key, found = row["key"], row["metrics"]
    lines.append(
      [
        key["model"],
        f"{key['context']:,} + {key['choice']}",
        f"{found['alone']:.2f}",
        f"{found['shared']:.2f}",
        f"{found['speedup']:.1f} ×",
        f"{found['difference']:.0e}",
      ]
    )
  header = ["model", "tokens", "separate, s", "shared, s", "speedup", "largest difference"]
  return (
    "Four continuations per context, as in multiple-choice tasks: one prefill of the context for"
    f" all four (shared), or one for each (separate).\n\n{table(header, lines)}"
  )
