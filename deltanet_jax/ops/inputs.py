"""Preparation of arguments that the recurrent operators share."""

import jax.numpy as jnp


def initial_state(S0, shape, dtype):
  """Return S0 in `dtype`, zeros of `shape` if it is None."""
  return jnp.zeros(shape, dtype) if S0 is None else S0.astype(dtype)


def cast_all(dtype, *arrays):
  """Return the arrays in `dtype`; those that are None stay None."""
  return tuple(None if x is None else x.astype(dtype) for x in arrays)


def scaled_heads(q, k, scale, heads, dtype):
  """Return (scale q, k) of `[B L H dk]` in `dtype`, each head repeated to make up `heads`."""
  return tuple(jnp.repeat(x.astype(dtype), heads // x.shape[2], axis=2) for x in (q * scale, k))
