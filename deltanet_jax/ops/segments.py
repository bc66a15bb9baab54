"""Packed sequences: segment boundaries, running segment numbers and positions inside segments.

`segment_ids` `[B L]` assigns each token of a sequence to a segment. A segment ends wherever the id
changes; an id that occurs again later is a new segment.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def segment_starts(segment_ids: Int[Array, "B L"] | None) -> Bool[Array, "B L"] | None:
  """Mark the first token of each segment, None for None.

  The first token of a sequence is never marked: it may continue the segment of an initial state.
  """
  if segment_ids is None:
    return None
  return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def number_segments(segment_ids: Int[Array, "B L"] | None) -> Int[Array, "B L"] | None:
  """Number the segments of each sequence 0, 1, .. in order; None for None."""
  if segment_ids is None:
    return None
  return jnp.cumsum(segment_starts(segment_ids), axis=1, dtype=jnp.int32)


def segment_positions(
  start: Int[Array, " B"], length: int, segment_ids: Int[Array, "B L"] | None = None
) -> Int[Array, "B L"]:
  """Return each token's position in its segment; the first segment continues from `start`."""
  index = jnp.arange(length, dtype=jnp.int32)[None, :]
  if segment_ids is None:
    return start[:, None] + index
  starts = jnp.where(segment_starts(segment_ids), index, -start[:, None])
  return index - lax.cummax(starts, axis=1)
