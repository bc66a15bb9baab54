"""Softmax attention under a mask: plain products, or `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp

from deltanet_jax.ops.nonfinite import has_nonfinite, nonfinite_reach, zero_nonfinite
from pallas_kernels.attention.reference import attention, causal_mask


def portable(q):
  """The implementation that every platform has."""
  return "xla" if q.dtype == jnp.float32 else "plain"


def attend(q, k, v, mask, implementation, window=None):
  """Attention where `mask` [B L M]; None is causal, with a window. k, v may have fewer heads."""
  bad, own = has_nonfinite(k, v), has_nonfinite(q)
  if mask is None:
    seen = nonfinite_reach(bad, None, window=window)
  else:
    # As a product: which queries see a key that is not finite.
    seen = jnp.einsum("bij,bjh->bih", mask.astype(jnp.float32), bad.astype(jnp.float32)) > 0
  o = _attend(zero_nonfinite(q), zero_nonfinite(k), zero_nonfinite(v), mask, implementation, window)
  seen = jnp.repeat(seen, q.shape[2] // k.shape[2], axis=2)
  return jnp.where((seen | own)[..., None], jnp.nan, o)


def _attend(q, k, v, mask, implementation, window):
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
  if mask is None:
    index = jnp.arange(q.shape[1])
    mask = causal_mask(index[:, None], index[None, :], window)[None]
  return attention(q, k, v, mask)
