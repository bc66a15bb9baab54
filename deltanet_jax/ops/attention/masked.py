"""Causal attention under masks: whole, by windows, or by blocks of queries on a CPU."""

import jax
import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.attention.forms import attend
from deltanet_jax.ops.dispatch import target_platform
from pallas_kernels.attention.reference import causal_mask

# Queries whose scores exist at a time on a CPU. Their blocks are in groups, each of which sees the
# keys up to its end: 4 of them, more where that leaves 4 blocks in each, but not many: each is a
# program of its own to be compiled. Measurements: BUILD_NOTES.md.
_BLOCK, _GROUPS, _MOST_GROUPS = 256, 4, 8


def masked_attention(q, k, v, segments, window, implementation):
  """`causal_attention` by an implementation of `attend`; segments are numbered, or None."""
  B, L, H, d = q.shape
  if window is None or 2 * window >= L or implementation == "cudnn":
    if L > 2 * _BLOCK and target_platform() == "cpu":
      return _by_blocks(q, k, v, segments, window, implementation)
    mask = None
    if segments is not None:
      index = jnp.arange(L, dtype=jnp.int32)
      mask = causal_mask(index[:, None], index[None, :], window)[None]
      mask = mask & (segments[:, :, None] == segments[:, None, :])
    return attend(q, k, v, mask, implementation, window)

  # Blocks of `window` tokens see themselves and the block before: L * 2 window scores, not L * L.
  n = -(-L // window)
  pad = n * window - L
  q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
  index = jnp.arange(n * window, dtype=jnp.int32)[None, :]
  segments = (
    jnp.zeros_like(index)
    if segments is None
    else jnp.pad(segments, ((0, 0), (0, pad)), mode="edge")
  )
  segments, index = jnp.broadcast_arrays(segments, jnp.broadcast_to(index, (B, n * window)))

  def blocks(x, before):
    x = x.reshape(B, n, window, *x.shape[2:])
    if before is not None:
      first = jnp.full_like(x[:, :1], before)
      x = jnp.concatenate([jnp.concatenate([first, x[:, :-1]], axis=1), x], axis=2)
    return x.reshape(B * n, *x.shape[2:])

  queries = (blocks(q, None), blocks(index, None), blocks(segments, None))
  # The block before the first has index -window, out of every window.
  keys = (blocks(k, 0), blocks(v, 0), blocks(index, -window), blocks(segments, -1))

  def windowed(queries, keys):
    (q, i, own), (k, v, j, of_keys) = queries, keys
    mask = causal_mask(i[:, :, None], j[:, None, :], window)
    return attend(q, k, v, mask & (own[:, :, None] == of_keys[:, None, :]), implementation)

  if window > _BLOCK and target_platform() == "cpu":
    o = _in_parts(windowed, queries, keys, window)
  else:
    o = windowed(queries, keys)
  return o.reshape(B, n * window, H, d)[:, :L]


def _in_parts(windowed, queries, keys, window):
  """`windowed` for a part of a block's queries and the keys that they can see, a block at a time.

  Scores are computed again in the backward.
  """
  parts = min(max(window // _BLOCK, _GROUPS), _MOST_GROUPS)
  outputs, size = [], -(-window // parts)
  one = jax.checkpoint(lambda x: windowed(*jax.tree.map(lambda y: y[None], x))[0])
  for first in range(0, window, size):
    of_queries = jax.tree.map(lambda x: x[:, first : first + size], queries)
    of_keys = jax.tree.map(lambda x: x[:, first : first + window + size], keys)
    outputs.append(lax.map(one, (of_queries, of_keys)))
  return jnp.concatenate(outputs, axis=1)


def _by_blocks(q, k, v, segments, window, implementation):
  """Scores of one block of queries at a time, computed again in the backward.

  They stay in the cache, and of those that the mask would drop only some are computed.
  """
  B, L = q.shape[:2]
  count = -(-L // _BLOCK)
  pad = count * _BLOCK - L
  fold = lambda x: jnp.moveaxis(x.reshape(B, count, _BLOCK, *x.shape[2:]), 1, 0)
  queries = fold(jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))))
  index = jnp.arange(count * _BLOCK, dtype=jnp.int32).reshape(count, _BLOCK)
  own = None if segments is None else fold(jnp.pad(segments, ((0, 0), (0, pad)), mode="edge"))
  groups = min(max(count // 4, _GROUPS), _MOST_GROUPS)
  outputs, size = [], -(-count // groups)
  for first in range(0, count, size):
    last = min(first + size, count)
    end = min(last * _BLOCK, L)

    @jax.checkpoint
    def block(x, k, v, end=end):
      q, index, own = x
      mask = causal_mask(index[:, None], jnp.arange(end, dtype=jnp.int32)[None, :], window)[None]
      if own is not None:
        mask = mask & (own[:, :, None] == segments[:, None, :end])
      return attend(q, k, v, jnp.broadcast_to(mask, (B, *mask.shape[1:])), implementation)

    part = jax.tree.map(lambda x: x[first:last], (queries, index, own))
    outputs.append(lax.map(lambda x: block(x, k[:, :end], v[:, :end]), part))
  o = jnp.moveaxis(jnp.concatenate(outputs), 0, 1)
  return o.reshape(B, count * _BLOCK, *o.shape[3:])[:, :L]
