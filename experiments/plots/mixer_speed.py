"""One layer of every mixer beside DeltaNet: forward+backward on this machine."""

from experiments.lib.tables import table


def tables(rows: list[dict]) -> str:
  lines = []
  for row in sorted(rows, key=lambda row: row["metrics"]["over_deltanet"]):
    x = row["metrics"]
    cells = [row["key"]["kind"], f"{1e3 * x['seconds']:.0f}", f"{x['over_deltanet']:.2f}"]
    cells += [f"{x['temporary_bytes'] / 2**20:.0f}", f"{x['memory_over_deltanet']:.2f}"]
    lines.append(cells)
  key = rows[0]["key"]
  header = ["mixer", "ms", "over DeltaNet", "temporary, MiB", "over DeltaNet's"]
  return (
    f"Forward and backward of one layer with its default settings, width {key['width']},"
    f" {key['batch']} x {key['length']} tokens, float32, all in turn in one run.\n\n"
    f"{table(header, lines)}"
  )
