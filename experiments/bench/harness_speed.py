"""Time the scoring of four continuations of a long context: with a shared prefill and without.

  python -m experiments.bench.harness_speed
  python -m experiments.bench.harness_speed --preset=transformer-tiny --context=1024

Computes log-likelihoods as lm-evaluation-harness requests them for a task with four choices. Checks
that both give the same values; compilation is not timed, and the fastest of several rounds counts.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import time

import numpy as np
from absl import flags

from deltanet_jax.eval.harness import ContinuationScorer
from deltanet_jax.models import build, preset
from experiments.bench.timing import best_seconds
from experiments.lib import app, records
from experiments.lib.tables import table

_PRESETS = flags.DEFINE_multi_string(
  "preset", ["deltanet-tiny", "deltanet-sliding-tiny", "transformer-tiny"], "Models; repeatable."
)
_WIDTH = flags.DEFINE_integer("width", 128, "Width of the model.", lower_bound=32)
_CONTEXT = flags.DEFINE_integer("context", 1000, "Length of a context in tokens.", lower_bound=2)
_CHOICE = flags.DEFINE_integer("choice", 12, "Length of a continuation in tokens.", lower_bound=1)
_QUESTIONS = flags.DEFINE_integer("questions", 8, "Number of contexts.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 8, "Batch size.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "Timed rounds, of which the fastest counts.", lower_bound=1
)
_CHOICES = 4
_TOLERANCE = 1e-3  # of the log-likelihood of a continuation


def requests(vocab: int) -> list[tuple[list[int], list[int]]]:
  """Random pairs of context and continuation."""
  rng = np.random.default_rng(0)
  ids = lambda count: rng.integers(0, vocab, count).tolist()
  contexts = [ids(_CONTEXT.value) for _ in range(_QUESTIONS.value)]
  return [(context, ids(_CHOICE.value)) for context in contexts for _ in range(_CHOICES)]


def measure(name: str) -> dict:
  """Seconds with and without sharing the prefill."""
  cfg = preset(name, width=_WIDTH.value)
  model, pairs = build(cfg), requests(cfg.vocab)
  longest = _CONTEXT.value + _CHOICE.value
  scorers = {
    reuse: ContinuationScorer(model, batch=_BATCH.value, max_length=longest, reuse=reuse)
    for reuse in (True, False)
  }
  found = {reuse: [x.logprob for x in scorer(pairs)] for reuse, scorer in scorers.items()}
  difference = float(np.abs(np.subtract(found[True], found[False])).max())
  if difference > _TOLERANCE:
    raise ValueError(
      f"{name}: log-likelihoods with and without a shared prefill differ by {difference}."
    )
  programs = {reuse: lambda scorer=scorer: scorer(pairs) for reuse, scorer in scorers.items()}
  seconds, rounds = best_seconds(programs, _ROUNDS.value, 120.0)
  return dict(
    shared=seconds[True],
    alone=seconds[False],
    speedup=seconds[False] / seconds[True],
    difference=difference,
    rounds=rounds,
  )


def main():
  out, lines = records.open("harness_speed"), []
  for name in _PRESETS.value:
    sizes = dict(width=_WIDTH.value, context=_CONTEXT.value, choice=_CHOICE.value)
    key = dict(model=name, **sizes, questions=_QUESTIONS.value, batch=_BATCH.value)
    if out.has(key):
      continue
    start = time.perf_counter()
    metrics = measure(name)
    out.write(key, metrics, time.perf_counter() - start)
    cells = [f"{metrics[x]:.2f}" for x in ("alone", "shared", "speedup")]
    lines.append([name, *cells, f"{metrics['difference']:.0e}"])
  if lines:
    print(table(["model", "separate, s", "shared, s", "speedup", "largest difference"], lines))
  print(f"all records: {out.path}")


if __name__ == "__main__":
  app.run(main)
