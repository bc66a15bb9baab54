"""Measure the throughput of the data pipeline (tokens/s), to compare with that of training.

By default it tokenizes the bundled novels into a temporary folder; --corpus reads a prepared one.

  python -m experiments.bench.data_speed
  python -m experiments.bench.data_speed --corpus=FOLDER --length=2048 --batch=32 --workers=4
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import itertools
import tempfile
import time

from absl import flags
from tqdm import tqdm

from deltanet_jax.data import (
  CorpusTask,
  load_tokenizer,
  open_corpus,
  shipped_corpus,
  training_batches,
)
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.files import as_path
from experiments.lib import app, records
from experiments.lib.tables import table

_CORPUS = flags.DEFINE_string("corpus", None, "Folder written by experiments.prepare_data.")
_LENGTHS = flags.DEFINE_multi_integer("length", [512, 2048], "Sequence length; repeatable.")
_WORKERS = flags.DEFINE_multi_integer("workers", [0, 2], "Prefetch threads; repeatable.")
_BATCH = flags.DEFINE_integer("batch", 8, "Batch size.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 4_000_000, "Tokens per timed round.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "Timed rounds, of which the fastest counts.", lower_bound=1
)


def tokens_per_second(corpus, length: int, workers: int) -> float:
  """Throughput of the fastest round, after a warm-up of a few batches."""
  task = CorpusTask(corpus, length=length, batch=_BATCH.value)
  batches = training_batches(task, workers=workers)
  steps = max(_TOKENS.value // (_BATCH.value * length), 1)
  best = 0.0
  for warm_up in [True] + [False] * _ROUNDS.value:
    count = 8 if warm_up else steps
    start = time.perf_counter()
    for _ in range(count):
      next(batches)
    seconds = time.perf_counter() - start
    if not warm_up:
      best = max(best, count * _BATCH.value * length / seconds)
  batches.close()
  return best


def main():
  out = records.open("data_speed")
  corpus = as_path(_CORPUS.value).name if _CORPUS.value else "shipped"
  keys = [
    dict(corpus=corpus, batch=_BATCH.value, length=length, workers=workers)
    for length, workers in itertools.product(_LENGTHS.value, _WORKERS.value)
  ]
  lines = []
  with tempfile.TemporaryDirectory() as folder:
    if not _CORPUS.value:
      prepare(shipped_corpus(), folder, load_tokenizer("bytes"), validation=0.1)
    opened = open_corpus(_CORPUS.value or folder)
    for key in tqdm([x for x in keys if not out.has(x)], unit="case"):
      start = time.perf_counter()
      speed = tokens_per_second(opened, key["length"], key["workers"])
      metrics = dict(tokens_per_second=speed, corpus_tokens=opened.train.tokens)
      out.write(key, metrics, time.perf_counter() - start)
      lines.append([*map(str, key.values()), f"{speed / 1e6:.2f}"])
  if lines:
    print(table(["corpus", "batch", "length", "workers", "million tokens/s"], lines))
  print(f"all records: {out.path}")


if __name__ == "__main__":
  app.run(main)
