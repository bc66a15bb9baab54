"""Preparation of arguments that the recurrent operators share."""

import jax.numpy as jnp

from pallas_kernels.common.varying import vary_over, varying_axes


def initial_state(S0, shape, dtype, like):
  """Return S0 in `dtype`; zeros of `shape` if it is None, varying over the mesh axes of `like`."""
  if S0 is not None:
    return S0.astype(dtype)
  return vary_over(jnp.zeros(shape, dtype), varying_axes(like))


def cast_all(dtype, *arrays):
  """Return the arrays in `dtype`; those that are None stay None."""
  return tuple(None if x is None else x.astype(dtype) for x in arrays)


def scaled_heads(q, k, scale, heads, dtype):
  """Return (scale q, k) of `[B L H dk]` in `dtype`, each head repeated to make up `heads`."""
  return tuple(jnp.repeat(x.astype(dtype), heads // x.shape[2], axis=2) for x in (q * scale, k))
