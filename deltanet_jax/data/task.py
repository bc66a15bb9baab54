"""Interface of a training task: vocabulary, identity, batches by step, validation."""

import abc
import pathlib
import sys
from collections.abc import Iterator

import grain
import numpy as np

# tokens, targets, segment_ids [b L] int32, and mask [b L] bool: True for scored targets. Unscored
# targets may have any value. Training checks every batch (`device_batches.check_batch`).
Batch = dict[str, np.ndarray]
_PREFETCH = 4  # batches per worker thread


class ValidationSource(abc.ABC):
  """Batches to evaluate on.

  Attributes:
    validation_bytes: Size of the text of all `validation` targets in bytes; None if not text.
  """

  validation_bytes: int | None = None

  @abc.abstractmethod
  def validation(self, host: int, hosts: int) -> Iterator[Batch]:
    """Return the validation batches in order; every host gets the same number."""


class Task(ValidationSource):
  """Source of training and validation batches, deterministic for any number of hosts.

  Attributes:
    vocab: Vocabulary size.
    shape: (global batch size, sequence length).
  """

  vocab: int
  shape: tuple[int, int]

  @abc.abstractmethod
  def identity(self) -> dict[str, str]:
    """Return hashes or settings, by name, that must be equal when a run resumes."""

  @abc.abstractmethod
  def batch(self, step: int, host: int, hosts: int) -> Batch:
    """Return this host's part of batch `step`: a deterministic function of the arguments."""

  def validation(self, host: int, hosts: int) -> Iterator[Batch]:
    """Return the validation batches; none by default."""
    return iter(())

  def describe(self) -> dict:
    """Return JSON metadata needed to use the trained model, e.g. the tokenizer's name."""
    return {}

  def keep(self, folder: str | pathlib.Path):
    """Save files needed to use the trained model to the run's folder; none by default."""
    return

  def remark(self, vocab: int) -> str | None:
    """Return a one-line warning about a probably unintended vocabulary size, or None."""
    return None


def sequences_per_host(batch: int, host: int, hosts: int) -> int:
  """Return the per-host batch size; raises unless `hosts` divides the batch."""
  if not 0 <= host < hosts:
    raise ValueError(f"host is {host}, expected 0 to {hosts - 1}.")
  if batch < 1 or batch % hosts:
    raise ValueError(f"batch is {batch}, expected a multiple of the {hosts} hosts.")
  return batch // hosts


class _Steps:
  """One host's batches of a task, as a random-access source for grain."""

  def __init__(self, task: Task, host: int, hosts: int):
    sequences_per_host(task.shape[0], host, hosts)
    self._task, self._host = task, (host, hosts)

  def __len__(self) -> int:
    return sys.maxsize // 2  # unlimited

  def __getitem__(self, step: int) -> Batch:
    return self._task.batch(step, *self._host)


def training_batches(
  task: Task, *, host: int = 0, hosts: int = 1, workers: int = 0, start: int = 0
) -> grain.DatasetIterator[Batch]:
  """Iterate over training batches, from step `start` on, without end.

  The concatenation over hosts is the same batch for any number of hosts.

  Args:
    task: Source of the batches.
    host: Index of this host.
    hosts: Number of hosts.
    workers: Threads that prefetch batches; 0 reads synchronously.
    start: First step.
  """
  options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=_PREFETCH * workers)
  steps = grain.MapDataset.source(_Steps(task, host, hosts))
  batches = iter(steps.to_iter_dataset(options))
  batches.set_state({"next_index": start})
  return batches
