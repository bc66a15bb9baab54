"""Time and memory of one layer of every mixer relative to DeltaNet, forward+backward."""

from experiments.lib.tables import table


def tables(rows: list[dict]) -> str:
  lines = []
  for row in sorted(rows, key=lambda row: row["metrics"]["over_deltanet"]):
    x = row["metrics"]
    cells = [row["key"]["kind"], f"{1e3 * x['seconds']:.0f}", f"{x['over_deltanet']:.2f}"]
    cells += [f"{x['temporary_bytes'] / 2**20:.0f}", f"{x['memory_over_deltanet']:.2f}"]
    lines.append(cells)
  key = rows[0]["key"]
  header = ["mixer", "ms", "× DeltaNet", "temporary MiB", "× DeltaNet"]
  return (
    f"Forward and backward pass of one layer with default settings, width {key['width']},"
    f" {key['batch']} x {key['length']} tokens, float32, timed alternately in one run.\n\n"
    f"{table(header, lines)}"
  )
