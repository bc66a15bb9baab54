"""Baseline of RegBench: n-gram models counted in the context of each sequence.

  python -m experiments.bench.regbench_ngram
  python -m experiments.bench.regbench_ngram --setting=mini --seed=7 --automata=3000

DFA accuracy of 1- to 5-grams with back-off, on automata like those of the test split.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import itertools
import time

from absl import flags
from tqdm import tqdm

from deltanet_jax.data import RegBench
from deltanet_jax.eval.accuracy import accepted
from deltanet_jax.eval.in_context_ngram import ngram_predictions
from experiments.configs import regbench
from experiments.lib import app, records
from experiments.lib.tables import table

# Name -> changes to the automata and strings of the benchmark.
SETTINGS = dict(full={}, mini=regbench.SMALL)
_SETTINGS = flags.DEFINE_multi_enum(
  "setting", list(SETTINGS), list(SETTINGS), "Automata of the benchmark, or small ones; repeatable."
)
_SEEDS = flags.DEFINE_multi_integer("seed", list(range(10)), "Seed of the automata; repeatable.")
_AUTOMATA = flags.DEFINE_integer(
  "automata", 300, "Number of automata per seed, with one sequence each.", lower_bound=1
)
_ORDERS = 5


def measure(setting: str, seed: int, automata: int) -> list[float]:
  """DFA accuracy of n-grams for n = 1, 2, ..."""
  task = RegBench(
    batch=automata, examples=None, seed=seed, test_examples=automata, **SETTINGS[setting]
  )
  (batch,) = task.test.validation(0, 1)
  found = ngram_predictions(batch["tokens"], _ORDERS, never=(0, task.separator))
  return [float(accepted(batch, ids)[batch["mask"]].mean()) for ids in found]


def main():
  out = records.open("regbench_ngram")
  keys = [
    dict(setting=setting, automata=_AUTOMATA.value, seed=seed)
    for setting, seed in itertools.product(_SETTINGS.value, _SEEDS.value)
  ]
  lines = []
  for key in tqdm([x for x in keys if not out.has(x)], unit="set"):
    start = time.perf_counter()
    accuracies = measure(**key)
    out.write(key, dict(dfa_accuracy=accuracies), time.perf_counter() - start)
    lines.append([key["setting"], str(key["seed"]), *(f"{100 * x:.1f}" for x in accuracies)])
  if lines:
    print(table(["setting", "seed", *(f"{n + 1}-gram" for n in range(_ORDERS))], lines))
  print(f"all records: {out.path}; table: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main)
