"""Throughput of the data pipeline."""

from experiments.lib.tables import table


def tables(rows: list[dict]) -> str:
  lines = []
  for row in rows:
    key = row["key"]
    shape = [f"{key[name]:,}" for name in ("batch", "length", "workers")]
    lines.append([key["corpus"], *shape, f"{row['metrics']['tokens_per_second'] / 1e6:.1f}"])
  header = ["corpus", "batch size", "sequence length", "workers", "million tokens/s"]
  return table(header, lines)
