"""What a model is trained on: vocabulary, identity, batches by step, validation."""

import abc
import pathlib
import sys
from collections.abc import Iterator

import grain
import numpy as np

# tokens, targets, segment_ids [b L] int32, and mask [b L] bool of the targets that count.
Batch = dict[str, np.ndarray]
_PREFETCH = 4  # batches that each reading thread may be ahead


class ValidationSource(abc.ABC):
  """Batches to evaluate on.

  Attributes:
    validation_bytes: of the text that all targets of `validation` stand for; None if it is no text.
  """

  validation_bytes: int | None = None

  @abc.abstractmethod
  def validation(self, host: int, hosts: int) -> Iterator[Batch]:
    """Batches that are held out, in order, as many for every host."""


class Task(ValidationSource):
  """A source of batches, the same for any number of hosts.

  Attributes:
    vocab: token ids are below it.
    shape: rows of a batch over all hosts, and tokens of a row.
  """

  vocab: int
  shape: tuple[int, int]

  @abc.abstractmethod
  def identity(self) -> dict[str, str]:
    """What must be the same when a run goes on: hashes or settings, by name."""

  @abc.abstractmethod
  def batch(self, step: int, host: int, hosts: int) -> Batch:
    """This host's rows of batch number `step`: a function of its arguments alone."""

  def validation(self, host: int, hosts: int) -> Iterator[Batch]:
    """As of `ValidationSource`; none by default."""
    return iter(())

  def describe(self) -> dict:
    """JSON that a reader of the finished run needs, for instance the tokenizer's name."""
    return {}

  def keep(self, folder: str | pathlib.Path):
    """Writes files that such a reader needs as well into the folder of the run; none by default."""
    return

  def remark(self, vocab: int) -> str | None:
    """One line for people if a model of this vocabulary can be trained but hardly was meant."""
    return None


def sequences_per_host(batch: int, host: int, hosts: int) -> int:
  """Rows of one host, if they can be shared out."""
  if not 0 <= host < hosts:
    raise ValueError(f"host is {host}, expected 0 to {hosts - 1}.")
  if batch < 1 or batch % hosts:
    raise ValueError(f"batch is {batch}, expected a multiple of the {hosts} hosts.")
  return batch // hosts


class _Steps:
  """One host's batches of a task, as grain reads them."""

  def __init__(self, task: Task, host: int, hosts: int):
    sequences_per_host(task.shape[0], host, hosts)
    self._task, self._share = task, (host, hosts)

  def __len__(self) -> int:
    return sys.maxsize // 2  # batches have no end

  def __getitem__(self, step: int) -> Batch:
    return self._task.batch(step, *self._share)


def training_batches(
  task: Task, *, host: int = 0, hosts: int = 1, workers: int = 0, start: int = 0
) -> grain.DatasetIterator[Batch]:
  """Endless batches from step `start` on.

  The hosts' rows, one host after the other, are the same batch for any number of hosts.

  Args:
    workers: threads that read ahead; 0 reads when asked.
  """
  options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=_PREFETCH * workers)
  steps = grain.MapDataset.source(_Steps(task, host, hosts))
  batches = iter(steps.to_iter_dataset(options))
  batches.set_state({"next_index": start})
  return batches
