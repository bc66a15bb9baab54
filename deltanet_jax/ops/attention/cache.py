"""Attention of new tokens against a KV cache, a ring buffer of the last M tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.attention.xla import attend, portable_implementation
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.layer_state import LayerState, read, write, write_at
from deltanet_jax.ops.segments import segment_positions
from pallas_kernels.attention.reference import causal_mask


class Cache(NamedTuple):
  """KV cache: keys and values of the last M tokens; token p of a sequence is in slot p mod M.

  Heads come before tokens, so that a decoding step reads each head's keys as one matrix without a
  transpose.
  """

  k: Float[Array, "B H M d"] | LayerState
  v: Float[Array, "B H M d"] | LayerState
  index: Int[Array, ""]  # tokens of the sequence so far
  position: Int[Array, " B"]  # tokens of the current segment so far


def init_cache(B: int, M: int, heads: int, head_size: int, dtype) -> Cache:
  """Return an empty KV cache.

  Args:
    B: Batch size.
    M: Slots: the maximum sequence length, or the window of sliding-window attention.
    heads: Number of key heads.
    head_size: Channels of a head.
    dtype: Dtype of keys and values.
  """
  zeros = jnp.zeros((B, heads, M, head_size), dtype)
  return Cache(zeros, zeros, jnp.zeros((), jnp.int32), jnp.zeros((B,), jnp.int32))


def cached_attention(
  q: Float[Array, "B L H d"],
  k: Float[Array, "B L Hk d"],
  v: Float[Array, "B L Hk d"],
  cache: Cache,
  *,
  window: int | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B L H d"], Cache]:
  """Apply `causal_attention` to L tokens that follow those in the cache.

  A sequence must not become longer than M unless `window` <= M.

  Args:
    q: Queries of the new tokens.
    k: Their keys.
    v: Their values.
    cache: Keys and values of earlier tokens.
    window: Number of keys that a token sees, including its own; None for all.
    segment_ids: Segments of packed sequences; the first one continues the cached segment.

  Returns:
    o in q's dtype, and the updated cache.
  """
  L, M = q.shape[1], cache.k.shape[2]
  if window is not None and window > M:
    raise ValueError(f"window is {window}, but the cache holds only {M} tokens.")
  n = cache.index
  position = segment_positions(cache.position, L, segment_ids)
  index = n + jnp.arange(L, dtype=jnp.int32)
  slot = jnp.arange(M, dtype=jnp.int32)
  stored = n + L - 1 - (n + L - 1 - slot) % M  # token index in each slot after the update
  k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
  k_heads, v_heads = k.swapaxes(1, 2), v.swapaxes(1, 2)
  if L == 1:
    new_k = write_at(cache.k, k_heads, n % M, 2)
    new_v = write_at(cache.v, v_heads, n % M, 2)
    keys = stored
  else:
    before = n - 1 - (n - 1 - slot) % M
    keys = jnp.concatenate([before, index])
    k_heads = jnp.concatenate([read(cache.k), k_heads], axis=2)
    v_heads = jnp.concatenate([read(cache.v), v_heads], axis=2)
    source = jnp.where(stored >= n, M + stored - n, slot)
    new_k, new_v = write(cache.k, k_heads[:, :, source]), write(cache.v, v_heads[:, :, source])
  new = Cache(new_k, new_v, n + L, position[:, -1] + 1)
  # The first token of a segment is `position` tokens back; empty slots have negative indices.
  segment = (index[None, :] - position)[:, :, None]
  mask = causal_mask(index[:, None], keys[None, :], window)[None] & (keys[None, None, :] >= segment)
  if L == 1:
    return _step(q, read(new_k), read(new_v), mask), new
  k, v = (x.swapaxes(1, 2).astype(q.dtype) for x in (k_heads, v_heads))
  return attend(q, k, v, mask, portable_implementation(q)), new


def _step(q, k, v, mask):
  """Attend with one query per head to k and v `[B H M d]`, without copying the cache.

  The cache holds no later tokens, so non-finite values need no masking; only a key that has left
  the window may still reach the query while it is stored.
  """
  B, _, H, d = q.shape
  grouped = q.reshape(B, k.shape[1], H // k.shape[1], d).astype(k.dtype)
  dtype = accum_dtype(q.dtype)
  scores = jnp.einsum("bkgd,bkjd->bkgj", grouped, k, preferred_element_type=dtype) * d**-0.5
  P = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
  o = jnp.einsum("bkgj,bkjd->bkgd", P.astype(v.dtype), v)
  return o.reshape(B, 1, H, d).astype(q.dtype)
