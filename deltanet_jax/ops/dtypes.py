"""Accumulation dtypes and matmul precision."""

import jax
import jax.numpy as jnp


def accum_dtype(*dtypes):
  """Return the accumulation dtype: float64 if any of these is, else float32.

  It is the dtype of states, sums and softmax.
  """
  upcast = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
  return jnp.float64 if upcast else jnp.float32


def upcast(x):
  """Cast x to its accumulation dtype."""
  return x.astype(accum_dtype(x.dtype))


def state_dtype(*arrays):
  """Return the dtype of a state that accumulates these arrays; None entries are ignored."""
  return accum_dtype(*(x.dtype for x in arrays if x is not None))


def matmul_precision_for(dtype):
  """Return a context that sets the matmul precision for inputs of `dtype`.

  TPU and GPU round float32 factors to bfloat16 or TF32 by default. That is right for bfloat16
  inputs and silently wrong for float32 inputs, which need "highest". A CPU is always exact.
  """
  exact = jnp.finfo(dtype).bits >= 32
  return jax.default_matmul_precision("highest" if exact else "default")
