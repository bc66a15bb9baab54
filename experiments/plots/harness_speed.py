"""Scoring four continuations of a context from one state, beside each on its own."""

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
  header = ["model", "tokens", "alone, s", "shared, s", "speed-up", "largest difference"]
  return (
    "Four continuations of each context, as multiple-choice tasks ask: the context read once for"
    f" all four (shared), or with each (alone).\n\n{table(header, lines)}"
  )
