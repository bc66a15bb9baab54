"""The six tasks of the MAD benchmark (Mechanistic Architecture Design, Poli et al. 2024)."""

from deltanet_jax.data.synthetic.base import SyntheticTask
from deltanet_jax.data.synthetic.mad.copy_memorize_compress import Compress, Memorize, SelectiveCopy
from deltanet_jax.data.synthetic.mad.fuzzy_recall import FuzzyRecall
from deltanet_jax.data.synthetic.mad.in_context_recall import InContextRecall

TASKS: dict[str, type[SyntheticTask]] = dict(
  context_recall=InContextRecall,
  noisy_recall=InContextRecall,
  fuzzy_recall=FuzzyRecall,
  selective_copy=SelectiveCopy,
  memorize=Memorize,
  compress=Compress,
)


def _one_at_a_time(baseline: dict, **others: tuple) -> list[dict]:
  changed = [baseline | {name: value} for name, values in others.items() for value in values]
  return [baseline, *changed]


_FEWER = (6400, 3200, 1600, 800)
_LONGER = (256, 512, 1024)
# Arguments of `make` for each setting of a task: the baseline, then one factor changed at a time. A
# task's score is the mean over settings of the best test accuracy.
SETTINGS: dict[str, list[dict]] = dict(
  context_recall=_one_at_a_time(
    dict(vocab=16, length=128, examples=12800),
    vocab=(32, 64, 128),
    length=_LONGER,
    examples=_FEWER,
  ),
  noisy_recall=_one_at_a_time(
    dict(vocab=32, length=128, examples=12800, noise_vocab=16, noise=0.2),
    vocab=(48, 80, 144),
    length=_LONGER,
    examples=_FEWER,
    noise=(0.4, 0.6, 0.8),
  ),
  fuzzy_recall=_one_at_a_time(
    dict(vocab=16, length=128, examples=12800),
    vocab=(32, 64, 128),
    length=_LONGER,
    examples=_FEWER,
  ),
  selective_copy=_one_at_a_time(
    dict(vocab=16, length=256, examples=12800, copied=16),
    vocab=(32, 64, 128),
    length=(512, 1024),
    examples=_FEWER,
    copied=(32, 64, 96),
  ),
  memorize=_one_at_a_time(
    dict(vocab=256, length=32, examples=256), vocab=(512, 1024, 2048, 4096, 8192)
  ),
  compress=_one_at_a_time(
    dict(vocab=16, length=32, examples=12800),
    vocab=(32, 64, 128),
    length=(64, 128, 256),
    examples=_FEWER,
  ),
)


def make(
  task: str,
  *,
  vocab: int,
  length: int,
  examples: int | None,
  batch: int,
  seed: int = 0,
  shuffle: bool | None = None,
  validation_examples: int = 1280,
  test_examples: int = 1280,
  **extras,
) -> SyntheticTask:
  """Make a MAD task by name.

  Args:
    task: One of TASKS.
    vocab: Vocabulary size.
    length: Length of the drawn sequence, the benchmark's `seq_len`. For recall tasks the model's
      input lacks the last token; `shape` has the input length.
    examples: Size of the training set; None draws fresh examples for every batch.
    batch: Global batch size.
    seed: Of all examples.
    shuffle: Whether to reshuffle in every epoch; by default True for a fixed set.
    validation_examples: Size of the validation set.
    test_examples: Size of the test set.
    extras: Settings of single tasks: `noise` and `noise_vocab`, `copied`.
  """
  if task not in TASKS:
    raise ValueError(f"task is {task!r}, expected one of {list(TASKS)}.")
  return TASKS[task](
    vocab=vocab,
    length=length,
    batch=batch,
    seed=seed,
    examples=examples,
    shuffle=examples is not None if shuffle is None else shuffle,
    validation_examples=validation_examples,
    test_examples=test_examples,
    **extras,
  )


__all__ = [
  "SETTINGS",
  "TASKS",
  "Compress",
  "FuzzyRecall",
  "InContextRecall",
  "Memorize",
  "SelectiveCopy",
]
__all__ += ["make"]
