"""Softmax attention under a mask in plain products: the definition."""

import jax
import jax.numpy as jnp


def causal_mask(i, j, window):
  """Whether query i sees key j: one of the last `window`, or any before it for None."""
  mask = j <= i
  return mask if window is None else mask & (j > i - window)


def attention(q, k, v, mask):
  """softmax(q k^T / sqrt(d)) v where `mask` [B L M], in float32 at least.

  k and v may have fewer heads. A row that sees no key is the mean of all values.
  """
  wide = lambda x: x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
  H, d = q.shape[2:]
  k, v = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
  scores = jnp.einsum("bihd,bjhd->bhij", wide(q), wide(k)) * d**-0.5
  P = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1).astype(v.dtype)
  return jnp.einsum("bhij,bjhd->bihd", P, v)


def causal_attention(q, k, v, segments, window):
  """The same over the tokens of a segment up to the current one, `window` of them at most."""
  index = jnp.arange(q.shape[1], dtype=jnp.int32)
  mask = causal_mask(index[:, None], index[None, :], window)[None]
  if segments is not None:
    mask = mask & (segments[:, :, None] == segments[:, None, :])
  return attention(q, k, v, mask)
