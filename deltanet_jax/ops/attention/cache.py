"""Attention of new tokens against a ring buffer of old ones."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.attention.forms import attend, causal_mask, portable
from deltanet_jax.ops.documents import positions
from deltanet_jax.ops.slot import Slot, read, write, write_at


class Cache(NamedTuple):
  """Keys and values of the last M tokens; token p of the row sits in slot p mod M."""

  k: Float[Array, "B M H d"] | Slot
  v: Float[Array, "B M H d"] | Slot
  index: Int[Array, ""]  # tokens of the row so far
  position: Int[Array, " B"]  # tokens of the current document so far


def init_cache(B: int, M: int, heads: int, head_size: int, dtype) -> Cache:
  """An empty cache; `M` is the longest row, or the window of a sliding one."""
  zeros = jnp.zeros((B, M, heads, head_size), dtype)
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
  """`causal_attention` of L tokens that follow those in the cache; a row must not outgrow M
  unless `window` <= M.
  """
  L, M = q.shape[1], cache.k.shape[1]
  if window is not None and window > M:
    raise ValueError(f"window is {window}, but the cache holds only {M} tokens.")
  n = cache.index
  position = positions(cache.position, L, segment_ids)
  index = n + jnp.arange(L, dtype=jnp.int32)
  slot = jnp.arange(M, dtype=jnp.int32)
  held = n + L - 1 - (n + L - 1 - slot) % M  # token of each slot afterwards
  k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
  if L == 1:
    new_k, new_v = (write_at(old, x, n % M, 1) for old, x in ((cache.k, k), (cache.v, v)))
    k, v, keys = read(new_k), read(new_v), held
  else:
    before = n - 1 - (n - 1 - slot) % M
    keys = jnp.concatenate([before, index])
    k, v = (jnp.concatenate([read(old), x], axis=1) for old, x in ((cache.k, k), (cache.v, v)))
    source = jnp.where(held >= n, M + held - n, slot)
    new_k, new_v = write(cache.k, k[:, source]), write(cache.v, v[:, source])
  new = Cache(new_k, new_v, n + L, position[:, -1] + 1)
  # A document's first token is `position` back; slots still empty hold negative indices.
  document = (index[None, :] - position)[:, :, None]
  mask = causal_mask(index[:, None], keys[None, :], window)[None] & (
    keys[None, None, :] >= document
  )
  return attend(q, k.astype(q.dtype), v.astype(q.dtype), mask, portable(q)), new
