"""Which dtype sums and states have, and how exactly products are taken."""

import jax
import jax.numpy as jnp


def accum_dtype(*dtypes):
  """float32, or float64 if any of these is: the dtype of states, sums and softmax."""
  upcast = any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes)
  return jnp.float64 if upcast else jnp.float32


def upcast(x):
  return x.astype(accum_dtype(x.dtype))


def state_dtype(*arrays):
  """The dtype of a state that is made of these arrays, of which some may be None."""
  return accum_dtype(*(x.dtype for x in arrays if x is not None))


def matmul_precision_for(dtype):
  """Context in which products are as exact as inputs of `dtype` deserve.

  TPU and GPU round float32 factors to bfloat16 or TF32 unless told otherwise; that is right for
  bfloat16 inputs and silently wrong for float32 ones. A CPU always computes what it is given.
  """
  exact = jnp.finfo(dtype).bits >= 32
  return jax.default_matmul_precision("highest" if exact else "default")
