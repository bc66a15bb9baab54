"""DFA accuracy of n-grams in context on RegBench."""

import itertools

import numpy as np

from experiments.lib.tables import table

# Measured before with an independent implementation on 300 automata; None where it was not.
BEFORE = dict(full=(46.7, 81.9, 93.1, 94.8, 95.0), mini=(60.3, 82.8, 89.3, None, 90.0))


def tables(rows: list[dict]) -> str:
  parts = []
  group = lambda row: (row["key"]["setting"], row["key"]["automata"])
  for (setting, automata), of_group in itertools.groupby(sorted(rows, key=group), key=group):
    shares = 100 * np.array([row["metrics"]["dfa_accuracy"] for row in of_group])
    lines = []
    for n, (of_order, before) in enumerate(zip(shares.T, BEFORE[setting], strict=True), 1):
      spread = f"{of_order.min():.1f} to {of_order.max():.1f}"
      known = "–" if before is None else f"{before:.1f}"
      lines.append([str(n), f"{of_order.mean():.1f}", spread, known])
    header = ["n", "DFA accuracy (%)", "of single sets", "another implementation, one set"]
    parts.append(
      f"## The {setting} setting: {len(shares)} sets of {automata} automata\n\n"
      f"{table(header, lines)}"
    )
  return "\n".join(parts)
