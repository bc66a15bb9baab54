"""Causal softmax attention: whole sequences, and new tokens against a ring buffer of old ones."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.documents import number_documents, positions
from deltanet_jax.ops.dtypes import wide
from deltanet_jax.ops.slot import Slot, read, write, write_at

Implementation = Literal["plain", "xla", "cudnn"]


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


def causal_attention(
  q: Float[Array, "B L H d"],
  k: Float[Array, "B L Hk d"],
  v: Float[Array, "B L Hk d"],
  *,
  window: int | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  implementation: Implementation | None = None,
) -> Float[Array, "B L H d"]:
  """softmax(q k^T / sqrt(d)) v over the tokens of the same document up to the current one.

  Args:
    window: how many keys a token sees, its own included; None is all.
    implementation: "plain" products and softmax in the inputs' dtype (float32 at least), "xla" or
      "cudnn" of `jax.nn.dot_product_attention`. None takes cudnn on a GPU for half precision where
      it serves, xla for float32 and plain else: xla rounds float64 to float32, and its gradient
      for bfloat16 mixes dtypes, which strict promotion forbids.
  """
  B, L, H, d = q.shape
  if window is not None and window < 1:
    raise ValueError(f"window is {window}, expected at least 1 key, the token's own.")
  if implementation is None:
    cudnn = jax.default_backend() == "gpu" and _cudnn_serves(q)
    implementation = "cudnn" if cudnn else _portable(q)
  documents = None if segment_ids is None else number_documents(segment_ids)
  if window is None or 2 * window >= L or implementation == "cudnn":
    mask = None
    if documents is not None:
      index = jnp.arange(L, dtype=jnp.int32)
      mask = _causal(index[:, None], index[None, :], window)[None]
      mask = mask & (documents[:, :, None] == documents[:, None, :])
    return _attend(q, k, v, mask, implementation, window)

  # Blocks of `window` tokens see themselves and the block before: L * 2 window scores, not L * L.
  n = -(-L // window)
  pad = n * window - L
  q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
  index = jnp.arange(n * window, dtype=jnp.int32)[None, :]
  documents = (
    jnp.zeros_like(index)
    if documents is None
    else jnp.pad(documents, ((0, 0), (0, pad)), mode="edge")
  )
  documents, index = jnp.broadcast_arrays(documents, jnp.broadcast_to(index, (B, n * window)))

  def blocks(x, before):
    x = x.reshape(B, n, window, *x.shape[2:])
    if before is not None:
      first = jnp.full_like(x[:, :1], before)
      x = jnp.concatenate([jnp.concatenate([first, x[:, :-1]], axis=1), x], axis=2)
    return x.reshape(B * n, *x.shape[2:])

  # The block before the first has index -window, out of every window.
  mask = _causal(blocks(index, None)[:, :, None], blocks(index, -window)[:, None, :], window)
  mask = mask & (blocks(documents, None)[:, :, None] == blocks(documents, -1)[:, None, :])
  o = _attend(blocks(q, None), blocks(k, 0), blocks(v, 0), mask, implementation)
  return o.reshape(B, n * window, H, d)[:, :L]


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
  mask = _causal(index[:, None], keys[None, :], window)[None] & (keys[None, None, :] >= document)
  return _attend(q, k.astype(q.dtype), v.astype(q.dtype), mask, _portable(q)), new


def _causal(i, j, window):
  mask = j <= i
  return mask if window is None else mask & (j > i - window)


def _cudnn_serves(q):
  """Whether cuDNN takes these inputs, forward and backward: JAX refuses odd lengths."""
  half = q.dtype in (jnp.bfloat16, jnp.float16)
  return half and q.shape[1] % 2 == 0 and q.shape[3] % 8 == 0 and q.shape[3] <= 128


def _portable(q):
  return "xla" if q.dtype == jnp.float32 else "plain"


def _attend(q, k, v, mask, implementation, window=None):
  """Attention where `mask` [B L M]; None is causal, with a window. k, v may have fewer heads."""
  if implementation != "plain":
    # JAX mixes dtypes inside, which a caller may have forbidden.
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
  L, H, d = q.shape[1:]
  if mask is None:
    index = jnp.arange(L)
    mask = _causal(index[:, None], index[None, :], window)[None]
  k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum("bihd,bjhd->bhij", wide(q), wide(k)) * d**-0.5
  P = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1).astype(v.dtype)
  return jnp.einsum("bhij,bjhd->bihd", P, v)
