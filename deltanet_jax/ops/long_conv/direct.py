"""Long convolution over every pair of tokens: the definition."""

import jax.numpy as jnp


def convolve(u, h, segments):
  """Compute sum_{j <= t} h_{t-j} u_j within segments; u `[B H e L]`, h `[H L]`."""
  L = u.shape[-1]
  lag = jnp.arange(L)[:, None] - jnp.arange(L)[None, :]
  toeplitz = jnp.where(lag >= 0, h[:, jnp.maximum(lag, 0)], 0)
  if segments is None:
    return jnp.einsum("htj,bhej->bhet", toeplitz, u)
  same = (segments[:, :, None] == segments[:, None, :]).astype(u.dtype)
  return jnp.einsum("htj,btj,bhej->bhet", toeplitz, same, u)
