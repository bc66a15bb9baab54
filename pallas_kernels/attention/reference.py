"""Masked softmax attention in plain JAX: the definition."""

import jax
import jax.numpy as jnp


def causal_mask(i, j, window):
  """Return whether query i attends to key j: j <= i and, with a window, j > i - window."""
  mask = j <= i
  return mask if window is None else mask & (j > i - window)


def attention(q, k, v, mask):
  """Return softmax(q k^T / sqrt(d)) v over the keys in `mask` [B L M], softmax in >= float32.

  k and v may have fewer heads (GQA). A query with an all-False mask gets the mean of all values.
  """
  upcast = lambda x: x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
  H, d = q.shape[2:]
  k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum("bihd,bjhd->bhij", upcast(q), upcast(k)) * d**-0.5
  P = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1).astype(v.dtype)
  return jnp.einsum("bhij,bjhd->bihd", P, v)


def causal_attention(q, k, v, segments, window):
  """Attend to earlier tokens of the same segment, at most `window` of them."""
  index = jnp.arange(q.shape[1], dtype=jnp.int32)
  mask = causal_mask(index[:, None], index[None, :], window)[None]
  if segments is not None:
    mask = mask & (segments[:, :, None] == segments[:, None, :])
  return attention(q, k, v, mask)
