"""Causal softmax attention over whole sequences, all earlier tokens or a sliding window."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.attention.forms import attend, causal_mask, portable
from deltanet_jax.ops.documents import number_documents
from deltanet_jax.ops.platform import target_platform

Implementation = Literal["plain", "xla", "cudnn"]
# Queries whose scores exist at a time on a CPU, and into how many groups their blocks are put, each
# of which sees the keys up to its end. Measurements: BUILD_NOTES.md.
_BLOCK, _GROUPS = 256, 4


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
  if q.ndim != 4 or 0 in q.shape:
    raise ValueError(f"q has shape {q.shape}, expected non-empty [B, L, H, d].")
  B, L, H, d = q.shape
  if window is not None and window < 1:
    raise ValueError(f"window is {window}, expected at least 1 key, the token's own.")
  if implementation is None:
    # Not `target_platform`: JAX asks the installed cuDNN for its version while tracing.
    cudnn = jax.default_backend() == "gpu" and _cudnn_serves(q)
    implementation = "cudnn" if cudnn else portable(q)
  documents = None if segment_ids is None else number_documents(segment_ids)
  if window is None or 2 * window >= L or implementation == "cudnn":
    if L > 2 * _BLOCK and target_platform() == "cpu":
      return _by_blocks(q, k, v, documents, window, implementation)
    mask = None
    if documents is not None:
      index = jnp.arange(L, dtype=jnp.int32)
      mask = causal_mask(index[:, None], index[None, :], window)[None]
      mask = mask & (documents[:, :, None] == documents[:, None, :])
    return attend(q, k, v, mask, implementation, window)

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
  mask = causal_mask(blocks(index, None)[:, :, None], blocks(index, -window)[:, None, :], window)
  mask = mask & (blocks(documents, None)[:, :, None] == blocks(documents, -1)[:, None, :])
  o = attend(blocks(q, None), blocks(k, 0), blocks(v, 0), mask, implementation)
  return o.reshape(B, n * window, H, d)[:, :L]


def _by_blocks(q, k, v, documents, window, implementation):
  """Scores of one block of queries at a time, computed again in the backward.

  They stay in the cache, and of those that the mask would drop only some are computed.
  """
  B, L = q.shape[:2]
  count = -(-L // _BLOCK)
  pad = count * _BLOCK - L
  fold = lambda x: jnp.moveaxis(x.reshape(B, count, _BLOCK, *x.shape[2:]), 1, 0)
  queries = fold(jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))))
  index = jnp.arange(count * _BLOCK, dtype=jnp.int32).reshape(count, _BLOCK)
  own = None if documents is None else fold(jnp.pad(documents, ((0, 0), (0, pad)), mode="edge"))
  outputs, size = [], -(-count // _GROUPS)
  for first in range(0, count, size):
    last = min(first + size, count)
    end = min(last * _BLOCK, L)

    @jax.checkpoint
    def block(x, k, v, end=end):
      q, index, own = x
      mask = causal_mask(index[:, None], jnp.arange(end, dtype=jnp.int32)[None, :], window)[None]
      if own is not None:
        mask = mask & (own[:, :, None] == documents[:, None, :end])
      return attend(q, k, v, jnp.broadcast_to(mask, (B, *mask.shape[1:])), implementation)

    part = jax.tree.map(lambda x: x[first:last], (queries, index, own))
    outputs.append(lax.map(lambda x: block(x, k[:, :end], v[:, :end]), part))
  o = jnp.moveaxis(jnp.concatenate(outputs), 0, 1)
  return o.reshape(B, count * _BLOCK, *o.shape[3:])[:, :L]


def _cudnn_serves(q):
  """Whether cuDNN takes these inputs, forward and backward: JAX refuses odd lengths."""
  half = q.dtype in (jnp.bfloat16, jnp.float16)
  return half and q.shape[1] % 2 == 0 and q.shape[3] % 8 == 0 and q.shape[3] <= 128
