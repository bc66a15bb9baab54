"""The long convolution as it is written: every pair of tokens."""

import jax.numpy as jnp


def convolve(u, h, segments):
  """sum_{j <= t} h_{t-j} u_j of u `[B H e L]`, h `[H L]`, pairs of one segment alone."""
  L = u.shape[-1]
  back = jnp.arange(L)[:, None] - jnp.arange(L)[None, :]
  toeplitz = jnp.where(back >= 0, h[:, jnp.maximum(back, 0)], 0)
  if segments is None:
    return jnp.einsum("htj,bhej->bhet", toeplitz, u)
  same = (segments[:, :, None] == segments[:, None, :]).astype(u.dtype)
  return jnp.einsum("htj,btj,bhej->bhet", toeplitz, same, u)
