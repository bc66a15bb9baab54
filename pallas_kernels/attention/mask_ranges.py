"""Ranges of keys and queries that attend to each other, by causality, segment and window.

Query i attends to the keys first_keys[i] .. i; key j is attended to by the queries
j .. last_queries[j].
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.tiling import pad_axis

I32 = jnp.int32


def first_keys(segments, B, length, window):
  """Return [B length] int32, non-decreasing: the first key that each query attends to.

  segments [B L] or None are extended to `length` by the last segment.
  """
  index = jnp.arange(length, dtype=I32)[None]
  first = jnp.zeros((B, length), I32)
  if segments is not None:
    segments = pad_axis(segments, 1, length, mode="edge")
    change = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    first = lax.cummax(jnp.where(change, index, 0), axis=1)
  return first if window is None else jnp.maximum(first, index - (window - 1))


def last_queries(segments, B, length, window):
  """Return [B length] int32, non-decreasing: the last query that attends to each key."""
  index = jnp.arange(length, dtype=I32)[None]
  last = jnp.full((B, length), length - 1, I32)
  if segments is not None:
    segments = pad_axis(segments, 1, length, mode="edge")
    change = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (0, 1)))
    last = lax.cummin(jnp.where(change, index, length - 1), axis=1, reverse=True)
  return last if window is None else jnp.minimum(last, index + (window - 1))
