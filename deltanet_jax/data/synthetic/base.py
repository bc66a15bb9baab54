"""Base class of synthetic tasks: fresh examples at every step, or epochs over a fixed set."""

import abc
import threading
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from deltanet_jax.data.task import Batch, Task, ValidationSource, sequences_per_host

# Random streams, appended to the seed. SHARED is for data common to all examples, such as the
# key-value map of `Memorize`.
TRAINING, VALIDATION, TEST, ORDER, SHARED = range(5)
_BLOCK = 512  # examples of a fixed set drawn from one generator


class SyntheticTask(Task):
  """Task whose subclasses draw random examples.

  Validation and test batches have the training batch size. The last batch of an epoch, or of a
  validation or test set, is padded with fully masked examples.

  Attributes:
    epoch: Batches per epoch over a fixed set; None for fresh examples.
    test: Test set: tune hyperparameters on `validation`, report results on `test.validation`.
      Evaluators accept either: `task` or `task.test`.
  """

  # Name in `identity`, which is compared when a run resumes; None is the class name.
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
    vocab: Vocabulary size.
    length: Sequence length of the model's input.
    batch: Global batch size.
    seed: Of all examples.
    examples: Size of the training set; None draws fresh examples for every batch. A smaller set is
      a prefix of a larger one with the same seed.
    shuffle: Whether to reshuffle a fixed set in every epoch.
    validation_examples: Size of the validation set.
    test_examples: Size of the test set.
    """
    counts = dict(batch=batch, examples=examples, validation_examples=validation_examples)
    for name, count in (counts | dict(test_examples=test_examples)).items():
      if count is not None and count < 1:
        raise ValueError(f"{name} is {count}, expected at least 1.")
    if shuffle and examples is None:
      raise ValueError("shuffle=True needs a fixed training set: set examples, or shuffle=False.")
    self.vocab, self.shape, self.seed = vocab, (batch, length), seed
    self.epoch = None if examples is None else -(-examples // batch)
    self._examples, self._shuffle = examples, shuffle
    self._training = examples and _FixedSet(self, TRAINING, examples)
    self._validation = _FixedSet(self, VALIDATION, validation_examples)
    self.test: ValidationSource = _FixedSet(self, TEST, test_examples)

  @abc.abstractmethod
  def draw(self, random: np.random.Generator, examples: int, *, evaluation: bool) -> Batch:
    """Draw this number of examples.

    Args:
      random: Generator to draw from.
      examples: Number of examples.
      evaluation: Whether they are for validation or test, where a task may score other positions
        than in training.
    """

  @abc.abstractmethod
  def settings(self) -> dict:
    """Return the settings that determine the examples, other than the seed."""

  def random(self, *stream: int) -> np.random.Generator:
    """Return a generator that is determined by the seed and the stream."""
    return np.random.default_rng((self.seed, *stream))

  def identity(self):
    settings = self.settings() | dict(
      examples=self._examples, shuffle=self._shuffle, seed=self.seed
    )
    name = self.identity_name or type(self).__name__
    return dict(task=f"{name} of {', '.join(f'{k} {v}' for k, v in settings.items())}")

  def batch(self, step, host, hosts):
    B = self.shape[0]
    if self._training:
      return self._training.batch(*divmod(step, self.epoch), host, hosts, shuffle=self._shuffle)
    count = sequences_per_host(B, host, hosts)
    drawn = self.draw(self.random(TRAINING, step), B, evaluation=False)
    return {name: x[host * count : (host + 1) * count] for name, x in drawn.items()}

  def validation(self, host, hosts):
    return self._validation.validation(host, hosts)


class _FixedSet(ValidationSource):
  """A fixed set of a task's examples, drawn at the first access."""

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
    # The smallest dtype: 100,000 sequences of 512 tokens take 0.25 GB.
    small = np.min_scalar_type(task.vocab - 1)
    for block, start in enumerate(range(0, n, _BLOCK)):
      random = task.random(self._stream, block)
      drawn = task.draw(random, _BLOCK, evaluation=self._stream != TRAINING)
      del drawn["segment_ids"]  # constant
      for name, x in drawn.items():
        dtype = small if name in ("tokens", "targets") else x.dtype
        array = stored.setdefault(name, np.empty((n, x.shape[1]), dtype))
        array[start : start + _BLOCK] = x[: n - start]
    return stored

  def batch(self, epoch: int, number: int, host: int, hosts: int, *, shuffle: bool) -> Batch:
    """Return a host's part of batch `number` of an epoch."""
    B = self._task.shape[0]
    count = sequences_per_host(B, host, hosts)
    indices = number * B + host * count + np.arange(count)
    valid = indices < self._examples
    indices = np.where(valid, indices, 0)
    if shuffle:
      indices = self._task.random(ORDER, epoch).permutation(self._examples)[indices]
    arrays = {name: x[indices] for name, x in self._all().items()}
    return as_batch(**arrays | dict(mask=arrays["mask"] & valid[:, None]))

  def validation(self, host: int, hosts: int) -> Iterator[Batch]:
    batches = -(-self._examples // self._task.shape[0])
    return (self.batch(0, number, host, hosts, shuffle=False) for number in range(batches))


def distinct(random: np.random.Generator, below: int, shape: tuple[int, ...]) -> np.ndarray:
  """Draw integers in [0, below), distinct along the last axis; uniform over all such arrays.

  Rejection sampling: entries equal to one on their left are redrawn until there are none. This is
  symmetric in the values, hence uniform.
  """
  n = shape[-1]
  if n > below:
    raise ValueError(f"cannot draw {n} distinct numbers below {below}.")
  drawn = random.integers(0, below, shape).reshape(-1, n)
  rows = np.arange(len(drawn))  # with repeated values
  while rows.size:
    # Sorted by value, then column: all but the first of equal values follow an equal one.
    sorted_ = np.sort(drawn[rows] * n + np.arange(n))
    repeated = sorted_[:, 1:] // n == sorted_[:, :-1] // n
    row, column = np.nonzero(repeated)
    drawn[rows[row], sorted_[row, column + 1] % n] = random.integers(0, below, len(row))
    rows = rows[repeated.any(axis=1)]
  return drawn.reshape(shape)


def as_batch(
  tokens: np.ndarray, targets: np.ndarray, mask: np.ndarray, **more: np.ndarray
) -> Batch:
  """Cast to a `Batch` in which each sequence is one segment."""
  batch = dict(
    tokens=tokens.astype(np.int32), targets=targets.astype(np.int32), mask=mask.astype(bool)
  )
  return batch | dict(segment_ids=np.ones_like(batch["tokens"])) | more
