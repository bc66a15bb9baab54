"""Segments packed into one row: their numbers and the positions inside them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def segment_starts(segment_ids: Int[Array, "B L"]) -> Bool[Array, "B L"]:
  """Where a segment begins inside the row; never at its first token, which may continue one."""
  return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def number_segments(segment_ids: Int[Array, "B L"]) -> Int[Array, "B L"]:
  """Numbers the segments of each row 0, 1, ..: an id that comes back later is a new segment."""
  return jnp.cumsum(segment_starts(segment_ids), axis=1, dtype=jnp.int32)


def segment_positions(
  start: Int[Array, " B"], length: int, segment_ids: Int[Array, "B L"] | None = None
) -> Int[Array, "B L"]:
  """Position of each token in its segment; the first segment of a row goes on from `start`."""
  index = jnp.arange(length, dtype=jnp.int32)[None, :]
  if segment_ids is None:
    return start[:, None] + index
  begins = jnp.where(segment_starts(segment_ids), index, -start[:, None])
  return index - lax.cummax(begins, axis=1)
