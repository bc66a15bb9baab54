"""Tasks whose examples are drawn: fresh ones for ever, or a fixed set, read over and over."""

import abc
import threading
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from deltanet_jax.data.task import Batch, Task, ValidationSource, sequences_per_host

# Streams of random numbers, after the seed. What a whole task shares (a map that is memorised) has
# its own.
TRAINING, VALIDATION, TEST, ORDER, SHARED = range(5)
_BLOCK = 512  # examples of a fixed set that one generator of random numbers draws


class SyntheticTask(Task):
  """A task of which a subclass draws examples.

  Held-out examples come in batches of as many rows as in training. Where the examples do not fill
  the last batch of an epoch, or of what is held out, rows are added in which nothing counts.

  Attributes:
    epoch: batches in which every example of a fixed set comes once; None if examples are fresh.
    test: a second held-out set. Settings are chosen on `validation`; what is reported is of
      `test.validation`, so an evaluator of `task` is one of the first, of `task.test` of the other.
  """

  # In `identity`, which a resumed run compares; None is the name of the class.
  identity_name: ClassVar[str | None] = None

  def __init__(
    self,
    *,
    vocab: int,
    length: int,
    batch: int,
    seed: int,
    examples: int | None,
    shuffle: bool,
    validation_examples: int,
    test_examples: int,
  ):
    """Args:
    length: tokens of a row as the model reads it.
    examples: of training; None draws fresh ones for every batch. A smaller set is the beginning of
      a larger one of the same seed.
    shuffle: another order in every epoch instead of the same.
    """
    counts = dict(batch=batch, examples=examples, validation_examples=validation_examples)
    for name, count in (counts | dict(test_examples=test_examples)).items():
      if count is not None and count < 1:
        raise ValueError(f"{name} is {count}, expected at least 1.")
    if shuffle and examples is None:
      raise ValueError("shuffle is of a fixed set: give a number of examples, or leave it off.")
    self.vocab, self.shape, self.seed = vocab, (batch, length), seed
    self.epoch = None if examples is None else -(-examples // batch)
    self._examples, self._shuffle = examples, shuffle
    self._training = examples and _Fixed(self, TRAINING, examples)
    self._validation = _Fixed(self, VALIDATION, validation_examples)
    self.test: ValidationSource = _Fixed(self, TEST, test_examples)

  @abc.abstractmethod
  def draw(self, random: np.random.Generator, rows: int, *, held_out: bool) -> Batch:
    """Examples; of held-out ones a task may score other positions than it trains on."""

  @abc.abstractmethod
  def settings(self) -> dict:
    """What makes two tasks of one seed different."""

  def random(self, *stream: int) -> np.random.Generator:
    """The same random numbers for the same seed and stream."""
    return np.random.default_rng((self.seed, *stream))

  def identity(self):
    said = self.settings() | dict(examples=self._examples, shuffle=self._shuffle, seed=self.seed)
    name = self.identity_name or type(self).__name__
    return dict(task=f"{name} of {', '.join(f'{k} {v}' for k, v in said.items())}")

  def batch(self, step, host, hosts):
    B = self.shape[0]
    if self._training:
      return self._training.rows(*divmod(step, self.epoch), host, hosts, shuffle=self._shuffle)
    rows = sequences_per_host(B, host, hosts)
    drawn = self.draw(self.random(TRAINING, step), B, held_out=False)
    return {name: x[host * rows : (host + 1) * rows] for name, x in drawn.items()}

  def validation(self, host, hosts):
    return self._validation.validation(host, hosts)


class _Fixed(ValidationSource):
  """A fixed number of a task's examples, drawn when first asked for."""

  def __init__(self, task: SyntheticTask, stream: int, examples: int):
    self._task, self._stream, self._examples = task, stream, examples
    self._drawn: Batch | None = None
    self._lock = threading.Lock()  # grain reads in several threads

  def _all(self) -> Batch:
    with self._lock:
      if self._drawn is None:
        self._drawn = self._draw()
      return self._drawn

  def _draw(self) -> Batch:
    task, n, stored = self._task, self._examples, {}
    # As small as they get: 100,000 rows of 512 tokens are a quarter of a GB.
    small = np.min_scalar_type(task.vocab - 1)
    for block, start in enumerate(range(0, n, _BLOCK)):
      random = task.random(self._stream, block)
      drawn = task.draw(random, _BLOCK, held_out=self._stream != TRAINING)
      del drawn["segment_ids"]  # all alike
      for name, x in drawn.items():
        dtype = small if name in ("tokens", "targets") else x.dtype
        rows = stored.setdefault(name, np.empty((n, x.shape[1]), dtype))
        rows[start : start + _BLOCK] = x[: n - start]
    return stored

  def rows(self, epoch: int, number: int, host: int, hosts: int, *, shuffle: bool) -> Batch:
    """A host's rows of one batch of an epoch."""
    B = self._task.shape[0]
    own = sequences_per_host(B, host, hosts)
    places = number * B + host * own + np.arange(own)
    there = places < self._examples
    places = np.where(there, places, 0)
    if shuffle:
      places = self._task.random(ORDER, epoch).permutation(self._examples)[places]
    found = {name: x[places] for name, x in self._all().items()}
    return as_batch(**found | dict(mask=found["mask"] & there[:, None]))

  def validation(self, host: int, hosts: int) -> Iterator[Batch]:
    batches = -(-self._examples // self._task.shape[0])
    return (self.rows(0, number, host, hosts, shuffle=False) for number in range(batches))


def distinct(random: np.random.Generator, below: int, shape: tuple[int, ...]) -> np.ndarray:
  """Uniform integers from 0, no two alike along the last axis; `[.. n]` of at most `below`.

  All are drawn, then again those equal to one on their left until there are none. Nothing in this
  distinguishes one number from another, so every result is as likely as every other.
  """
  n = shape[-1]
  if n > below:
    raise ValueError(f"{n} different numbers below {below} were asked for: there are none.")
  drawn = random.integers(0, below, shape).reshape(-1, n)
  rows = np.arange(len(drawn))
  while rows.size:
    # Value first, then place: of equal values all but the first come after one like them.
    sorted_ = np.sort(drawn[rows] * n + np.arange(n))
    repeated = sorted_[:, 1:] // n == sorted_[:, :-1] // n
    row, at = np.nonzero(repeated)
    drawn[rows[row], sorted_[row, at + 1] % n] = random.integers(0, below, len(row))
    rows = rows[repeated.any(axis=1)]
  return drawn.reshape(shape)


def as_batch(
  tokens: np.ndarray, targets: np.ndarray, mask: np.ndarray, **more: np.ndarray
) -> Batch:
  """Rows of one document each."""
  batch = dict(
    tokens=tokens.astype(np.int32), targets=targets.astype(np.int32), mask=mask.astype(bool)
  )
  return batch | dict(segment_ids=np.ones_like(batch["tokens"])) | more
