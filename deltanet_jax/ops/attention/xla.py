"""Masked causal attention without Pallas kernels: plain matmuls or `jax.nn.dot_product_attention`.

`masked_attention` splits the sequence where that saves scores: blocks of one window, or on a CPU
blocks of queries. `attend` computes one block under its mask.
"""

import jax
import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.nonfinite import has_nonfinite, nonfinite_reach, zero_nonfinite
from pallas_kernels.attention.reference import attention, causal_mask

# Queries whose scores are materialized at a time on a CPU. Their blocks form groups; a group sees
# the keys up to its end. There are 4 groups, more where that leaves 4 blocks in each, but not many:
# each group is compiled separately. Measurements: BUILD_NOTES.md.
_BLOCK, _GROUPS, _MAX_GROUPS = 256, 4, 8


def portable_implementation(q) -> str:
  """Return the name of the implementation that runs on every platform."""
  return "xla" if q.dtype == jnp.float32 else "plain"


def masked_attention(q, k, v, segments, window, implementation):
  """Compute `causal_attention` with an implementation of `attend`.

  Args:
    segments: `[B L]` segment numbers from `number_segments`, or None.
    implementation: "plain", "xla" or "cudnn".
  """
  B, L, H, d = q.shape
  if window is None or 2 * window >= L or implementation == "cudnn":
    if L > 2 * _BLOCK and target_platform() == "cpu":
      return _by_query_blocks(q, k, v, segments, window, implementation)
    mask = None
    if segments is not None:
      index = jnp.arange(L, dtype=jnp.int32)
      mask = causal_mask(index[:, None], index[None, :], window)[None]
      mask = mask & (segments[:, :, None] == segments[:, None, :])
    return attend(q, k, v, mask, implementation, window)

  # Blocks of `window` tokens see themselves and the previous block: L * 2 window scores, not L * L.
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

  def blocks(x, fill):
    """[B L ..] to [B*n window ..]; with a `fill`, preceded by the previous block."""
    x = x.reshape(B, n, window, *x.shape[2:])
    if fill is not None:
      first = jnp.full_like(x[:, :1], fill)
      x = jnp.concatenate([jnp.concatenate([first, x[:, :-1]], axis=1), x], axis=2)
    return x.reshape(B * n, *x.shape[2:])

  queries = (blocks(q, None), blocks(index, None), blocks(segments, None))
  # The block before the first has index -window, outside every window.
  keys = (blocks(k, 0), blocks(v, 0), blocks(index, -window), blocks(segments, -1))

  def windowed(queries, keys):
    (q, i, q_segments), (k, v, j, k_segments) = queries, keys
    mask = causal_mask(i[:, :, None], j[:, None, :], window)
    mask = mask & (q_segments[:, :, None] == k_segments[:, None, :])
    return attend(q, k, v, mask, implementation)

  if window > _BLOCK and target_platform() == "cpu":
    o = _split_windows(windowed, queries, keys, window)
  else:
    o = windowed(queries, keys)
  return o.reshape(B, n * window, H, d)[:, :L]


def _split_windows(windowed, queries, keys, window):
  """Apply `windowed` to parts of a block's queries and the keys they see, block by block.

  The backward pass recomputes the scores.
  """
  parts = min(max(window // _BLOCK, _GROUPS), _MAX_GROUPS)
  outputs, size = [], -(-window // parts)
  one = jax.checkpoint(lambda x: windowed(*jax.tree.map(lambda y: y[None], x))[0])
  for first in range(0, window, size):
    part_queries = jax.tree.map(lambda x: x[:, first : first + size], queries)
    part_keys = jax.tree.map(lambda x: x[:, first : first + window + size], keys)
    outputs.append(lax.map(one, (part_queries, part_keys)))
  return jnp.concatenate(outputs, axis=1)


def _by_query_blocks(q, k, v, segments, window, implementation):
  """Materialize the scores of one block of queries at a time; the backward recomputes them.

  The scores stay in the cache, and most of those that the mask would drop are not computed.
  """
  B, L = q.shape[:2]
  count = -(-L // _BLOCK)
  pad = count * _BLOCK - L
  fold = lambda x: jnp.moveaxis(x.reshape(B, count, _BLOCK, *x.shape[2:]), 1, 0)
  queries = fold(jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))))
  index = jnp.arange(count * _BLOCK, dtype=jnp.int32).reshape(count, _BLOCK)
  q_segments = None
  if segments is not None:
    q_segments = fold(jnp.pad(segments, ((0, 0), (0, pad)), mode="edge"))
  groups = min(max(count // 4, _GROUPS), _MAX_GROUPS)
  outputs, size = [], -(-count // groups)
  for first in range(0, count, size):
    last = min(first + size, count)
    end = min(last * _BLOCK, L)

    @jax.checkpoint
    def block(x, k, v, end=end):
      q, index, q_segments = x
      mask = causal_mask(index[:, None], jnp.arange(end, dtype=jnp.int32)[None, :], window)[None]
      if q_segments is not None:
        mask = mask & (q_segments[:, :, None] == segments[:, None, :end])
      return attend(q, k, v, jnp.broadcast_to(mask, (B, *mask.shape[1:])), implementation)

    part = jax.tree.map(lambda x: x[first:last], (queries, index, q_segments))
    outputs.append(lax.map(lambda x: block(x, k[:, :end], v[:, :end]), part))
  o = jnp.moveaxis(jnp.concatenate(outputs), 0, 1)
  return o.reshape(B, count * _BLOCK, *o.shape[3:])[:, :L]


def attend(q, k, v, mask, implementation, window=None):
  """Compute attention under `mask` [B L M]; None is causal, with a window if given.

  k and v may have fewer heads than q. Non-finite values reach only the queries that see them.
  """
  bad, own = has_nonfinite(k, v), has_nonfinite(q)
  if mask is None:
    reached = nonfinite_reach(bad, None, window=window)
  else:
    # Which queries see a key with non-finite values, as a matmul.
    reached = jnp.einsum("bij,bjh->bih", mask.astype(jnp.float32), bad.astype(jnp.float32)) > 0
  q_ok, k_ok, v_ok = zero_nonfinite(q), zero_nonfinite(k), zero_nonfinite(v)
  o = _attend(q_ok, k_ok, v_ok, mask, implementation, window)
  reached = jnp.repeat(reached, q.shape[2] // k.shape[2], axis=2)
  return jnp.where((reached | own)[..., None], jnp.nan, o)


def _attend(q, k, v, mask, implementation, window):
  if implementation != "plain":
    # JAX mixes dtypes inside, which the caller's strict promotion would reject.
    with jax.numpy_dtype_promotion("standard"):
      return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=None if mask is None else mask[:, None],
        is_causal=mask is None,
        local_window_size=None if mask is not None or window is None else (window - 1, 0),
        implementation=implementation,
      )
  if mask is None:
    index = jnp.arange(q.shape[1])
    mask = causal_mask(index[:, None], index[None, :], window)[None]
  return attention(q, k, v, mask)
