"""DFA accuracy of in-context n-grams on RegBench."""

import itertools

import numpy as np

from experiments.lib.tables import table

# Measured with an independent implementation on 300 automata; None if not measured.
INDEPENDENT = dict(full=(46.7, 81.9, 93.1, 94.8, 95.0), mini=(60.3, 82.8, 89.3, None, 90.0))


def tables(rows: list[dict]) -> str:
  parts = []
  group = lambda row: (row["key"]["setting"], row["key"]["automata"])
  for (setting, automata), of_group in itertools.groupby(sorted(rows, key=group), key=group):
    accuracies = 100 * np.array([row["metrics"]["dfa_accuracy"] for row in of_group])
    lines = []
    for n, (of_order, independent) in enumerate(
      zip(accuracies.T, INDEPENDENT[setting], strict=True), 1
    ):
      spread = f"{of_order.min():.1f} to {of_order.max():.1f}"
      known = "–" if independent is None else f"{independent:.1f}"
      lines.append([str(n), f"{of_order.mean():.1f}", spread, known])
    header = ["n", "DFA accuracy (%)", "range over seeds", "independent implementation, one seed"]
    parts.append(
      f"## The {setting} setting: {len(accuracies)} seeds of {automata} automata\n\n"
      f"{table(header, lines)}"
    )
  return "\n".join(parts)
