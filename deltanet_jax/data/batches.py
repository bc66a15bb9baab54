"""Rows of packed documents: shuffled without end for training, in order for evaluation."""

import math
from collections.abc import Iterator

import grain
import numpy as np

from deltanet_jax.data.shards import Split

Batch = dict[str, np.ndarray]
_PREFETCH = 4  # batches that each reading thread may be ahead


def _rows_per_host(length: int, batch: int, host: int, hosts: int) -> int:
  if length < 1:
    raise ValueError(f"length is {length}, expected a positive number.")
  if not 0 <= host < hosts:
    raise ValueError(f"host is {host}, expected 0 to {hosts - 1}.")
  if batch < 1 or batch % hosts:
    raise ValueError(f"batch is {batch}, expected a multiple of the {hosts} hosts.")
  return batch // hosts


def _read_rows(split: Split, windows: list[int], length: int) -> Batch:
  """Row i holds the `length` inputs of windows[i] and, one token on, their targets.

  Windows share one token: the last target of one is the first input of the next. What lies past
  the end of the stream is masked out, and a document of its own.
  """
  tokens = np.zeros((len(windows), length + 1), np.int32)
  segments = np.zeros((len(windows), length + 1), np.int32)
  inside = np.zeros((len(windows), length), bool)
  for row, window in enumerate(windows):
    start = window * length
    stop = min(start + length + 1, split.tokens)
    if start < stop - 1:
      size = stop - start
      tokens[row, :size], segments[row, :size] = split.read(start, stop)
      segments[row, size:] = segments[row, size - 1] + 1
      inside[row, : size - 1] = True
    else:
      segments[row] = 1
  # The first token of a document is bos, which nothing before it foretells.
  mask = inside & (segments[:, 1:] == segments[:, :-1])
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "segment_ids": segments[:, :-1],
    "mask": mask,
  }


class _Batches:
  """The batches of one host by step, a pure function of seed and step."""

  def __init__(self, split: Split, length: int, batch: int, seed: int, host: int, hosts: int):
    self._split, self._length, self._batch = split, length, batch
    self._rows = _rows_per_host(length, batch, host, hosts)
    self._first = host * self._rows
    if seed < 0:
      raise ValueError(f"seed is {seed}, expected 0 or more.")
    windows = (split.tokens - 1) // length
    if windows < batch:
      raise ValueError(
        f"The split {split.name!r} has {max(windows, 0)} rows of {length} tokens, fewer than the "
        f"batch of {batch}: use shorter rows, a smaller batch or more text."
      )
    # Shuffled anew in every epoch.
    self._order = grain.MapDataset.range(windows).seed(seed).shuffle().repeat()

  def __len__(self) -> int:
    return len(self._order) // self._batch

  def __getitem__(self, step: int) -> Batch:
    start = step * self._batch + self._first
    windows = [int(self._order[start + row]) for row in range(self._rows)]
    return _read_rows(self._split, windows, self._length)


def training_batches(
  split: Split,
  *,
  length: int,
  batch: int,
  seed: int = 0,
  host: int = 0,
  hosts: int = 1,
  workers: int = 0,
) -> grain.DatasetIterator[Batch]:
  """Endless batches of shuffled rows: tokens, targets, segment_ids and mask, each [b L].

  The hosts' rows, one host after the other, are the same batch for any number of hosts. The
  iterator's state is {"next_index": step}, so it fits any number of hosts and workers.

  Args:
    batch: rows of all hosts together; b = batch / hosts.
    workers: threads that read ahead; 0 reads when asked.
  """
  source = _Batches(split, length, batch, seed, host, hosts)
  options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=_PREFETCH * workers)
  return iter(grain.MapDataset.source(source).to_iter_dataset(options))


def evaluation_batches(
  split: Split, *, length: int, batch: int, host: int = 0, hosts: int = 1
) -> Iterator[Batch]:
  """All rows of a split in order, once; the last batch is filled up with masked rows.

  Every token but the bos of each document is a target of exactly one row.
  """
  rows = _rows_per_host(length, batch, host, hosts)
  if split.tokens < 2:
    raise ValueError(
      f"The split {split.name!r} has no text: prepare the corpus with a share for it."
    )
  windows = math.ceil((split.tokens - 1) / length)
  starts = range(host * rows, math.ceil(windows / batch) * batch, batch)
  return (_read_rows(split, list(range(start, start + rows)), length) for start in starts)
