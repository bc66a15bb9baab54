"""Batches of packed sequences: reshuffled every epoch for training, in order for evaluation."""

import math
from collections.abc import Iterator

import grain
import numpy as np

from deltanet_jax.data.corpus.shards import Split
from deltanet_jax.data.task import Batch, sequences_per_host


def _read_batch(split: Split, windows: list[int], length: int) -> Batch:
  """Read a batch: sequence i has the inputs of windows[i] and, shifted by one token, the targets.

  Windows overlap by one token: the last target of one is the first input of the next. Positions
  past the end of the stream are padding: masked out, in a separate segment.
  """
  tokens = np.zeros((len(windows), length + 1), np.int32)
  segments = np.zeros((len(windows), length + 1), np.int32)
  mask = np.zeros((len(windows), length), bool)
  for i, window in enumerate(windows):
    start = window * length
    stop = min(start + length + 1, split.tokens)
    if start < stop - 1:
      size = stop - start
      tokens[i, :size], segments[i, :size] = split.read(start, stop)
      segments[i, size:] = segments[i, size - 1] + 1
      mask[i, : size - 1] = True
    else:
      segments[i] = 1
  # The first token of a document, BOS, is not predicted from the previous document.
  mask &= segments[:, 1:] == segments[:, :-1]
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "segment_ids": segments[:, :-1],
    "mask": mask,
  }


class ShuffledSequences:
  """Batches of a split by step, reshuffled in every epoch."""

  def __init__(self, split: Split, *, length: int, batch: int, seed: int = 0):
    self._split, self._length, self._batch = split, length, batch
    _check_length(length)
    if seed < 0:
      raise ValueError(f"seed is {seed}, expected 0 or more.")
    windows = (split.tokens - 1) // length
    if windows < batch:
      raise ValueError(
        f"The split {split.name!r} has {max(windows, 0)} sequences of {length} tokens, fewer than"
        f" the batch size {batch}: use shorter sequences, a smaller batch or more text."
      )
    self._order = grain.MapDataset.range(windows).seed(seed).shuffle().repeat()

  def batch(self, step: int, host: int, hosts: int) -> Batch:
    """Return this host's part of batch `step`: arrays [b L], b = batch / hosts."""
    count = sequences_per_host(self._batch, host, hosts)
    start = step * self._batch + host * count
    windows = [int(self._order[start + i]) for i in range(count)]
    return _read_batch(self._split, windows, self._length)


def _check_length(length: int):
  if length < 1:
    raise ValueError(f"length is {length}, expected at least 1.")


def count_batches(split: Split, *, length: int, batch: int) -> int:
  """Return the number of batches of a split; the last one is padded."""
  return math.ceil(math.ceil(max(split.tokens - 1, 0) / length) / batch)


def evaluation_batches(
  split: Split, *, length: int, batch: int, host: int = 0, hosts: int = 1
) -> Iterator[Batch]:
  """Iterate over a split once, in order; the last batch is padded with masked sequences.

  Every token but the BOS of each document is a target exactly once, including EOS.
  """
  _check_length(length)
  count = sequences_per_host(batch, host, hosts)
  if split.tokens < 2:
    raise ValueError(
      f"The split {split.name!r} has no text: prepare the corpus with a nonzero fraction for it."
    )
  batches = count_batches(split, length=length, batch=batch)
  starts = range(host * count, batches * batch, batch)
  return (_read_batch(split, list(range(start, start + count)), length) for start in starts)
