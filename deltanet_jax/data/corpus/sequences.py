"""Rows of packed documents: shuffled without end for training, in order for evaluation."""

import math
from collections.abc import Iterator

import grain
import numpy as np

from deltanet_jax.data.corpus.shards import Split
from deltanet_jax.data.task import Batch, sequences_per_host


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


class ShuffledSequences:
  """Batches of a split's rows by step, shuffled anew in every epoch."""

  def __init__(self, split: Split, *, length: int, batch: int, seed: int = 0):
    self._split, self._length, self._batch = split, length, batch
    _check_length(length)
    if seed < 0:
      raise ValueError(f"seed is {seed}, expected 0 or more.")
    windows = (split.tokens - 1) // length
    if windows < batch:
      raise ValueError(
        f"The split {split.name!r} has {max(windows, 0)} rows of {length} tokens, fewer than the "
        f"batch of {batch}: use shorter rows, a smaller batch or more text."
      )
    self._order = grain.MapDataset.range(windows).seed(seed).shuffle().repeat()

  def batch(self, step: int, host: int, hosts: int) -> Batch:
    """This host's rows: tokens, targets, segment_ids and mask, each [b L], b = batch / hosts."""
    rows = sequences_per_host(self._batch, host, hosts)
    start = step * self._batch + host * rows
    windows = [int(self._order[start + row]) for row in range(rows)]
    return _read_rows(self._split, windows, self._length)


def _check_length(length: int):
  if length < 1:
    raise ValueError(f"length is {length}, expected a positive number.")


def count_batches(split: Split, *, length: int, batch: int) -> int:
  """Of all rows of a split, the last filled up."""
  return math.ceil(math.ceil(max(split.tokens - 1, 0) / length) / batch)


def evaluation_batches(
  split: Split, *, length: int, batch: int, host: int = 0, hosts: int = 1
) -> Iterator[Batch]:
  """All rows of a split in order, once; the last batch is filled up with masked rows.

  Every token but the bos of each document is a target of exactly one row, eos like any other.
  """
  _check_length(length)
  rows = sequences_per_host(batch, host, hosts)
  if split.tokens < 2:
    raise ValueError(
      f"The split {split.name!r} has no text: prepare the corpus with a share for it."
    )
  batches = count_batches(split, length=length, batch=batch)
  starts = range(host * rows, batches * batch, batch)
  return (_read_rows(split, list(range(start, start + rows)), length) for start in starts)
