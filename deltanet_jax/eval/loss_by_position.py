"""Loss by position in the context, for sequences longer than those of training."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from deltanet_jax.data import ValidationSource
from deltanet_jax.eval.evaluation import EvalContext

_FIRST = 16  # positions in the first bin; each next bin ends at twice the position


def bin_edges(length: int) -> list[int]:
  """Return the first position of each bin, and the length."""
  edges = [0, _FIRST]
  while edges[-1] < length:
    edges.append(min(2 * edges[-1], length))
  return edges if edges[-1] == length else [0, length]


def positions(segment_ids: np.ndarray) -> np.ndarray:
  """Return `[B L]`: the position of each token within its segment."""
  index = np.broadcast_to(np.arange(segment_ids.shape[1]), segment_ids.shape)
  starts = np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
  return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


class LossByPosition:
  """Evaluator of the loss at several sequence lengths, in total and by position.

  Yields, in nats per token, `loss_2048` over all targets of sequences of 2048 tokens, and
  `loss_2048_from_512` over targets at positions 512 to 1023 of their segment.
  """

  def __init__(
    self, sources: Mapping[int, tuple[ValidationSource, int]], batches: int | None = None
  ):
    """Initialize.

    Args:
      sources: by length, the validation source and its batch size.
      batches: number of batches of each length to read; None: all.
    """
    self._sources, self._batches = sources, batches

  def __call__(self, context: EvalContext) -> Iterator[tuple[str, float]]:
    for length, (source, batch_size) in self._sources.items():
      edges = bin_edges(length)
      sums, counts = np.zeros((2, len(edges) - 1))
      # Every process reads full batches, because it needs the position of every loss.
      batches = itertools.islice(source.validation(0, 1), self._batches)
      for batch, logprobs in context.at(length=length, batch=batch_size).target_logprobs(batches):
        position, loss = positions(batch["segment_ids"])[batch["mask"]], -logprobs[batch["mask"]]
        sums += np.histogram(position, edges, weights=loss.astype(np.float64))[0]
        counts += np.histogram(position, edges)[0]
      yield f"loss_{length}", float(sums.sum() / counts.sum())
      for first, total, count in zip(edges, sums, counts):
        if count:
          yield f"loss_{length}_from_{first}", float(total / count)
