"""How exactly products are taken where a platform leaves it open."""

import jax
import jax.numpy as jnp


def products_for(dtype):
  """Context in which products are as exact as inputs of `dtype` deserve.

  TPU and GPU round float32 factors to bfloat16 or TF32 unless told otherwise; that is right for
  bfloat16 inputs and silently wrong for float32 ones. A CPU always computes what it is given.
  """
  exact = jnp.finfo(dtype).bits >= 32
  return jax.default_matmul_precision("highest" if exact else "default")
