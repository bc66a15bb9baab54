"""x W for weights W, with a backward whose products need no transposed copies."""

import jax.numpy as jnp

from deltanet_jax.ops.dtypes import wide_dtype
from pallas_kernels.autodiff import backward_by_hand


def _backward(wide, args, d):
  x, kernel = args
  dtype = wide_dtype(x.dtype) if wide else x.dtype
  d = d.astype(x.dtype)
  dx = jnp.einsum("...o,io->...i", d, kernel.astype(x.dtype), preferred_element_type=dtype)
  dW = jnp.einsum("...i,...o->io", x, d, preferred_element_type=dtype)
  return dx.astype(x.dtype), dW.astype(kernel.dtype)


@backward_by_hand(_backward, static=(2,), inline=True)
def matmul(x, kernel, wide=False):
  """x [.. i] by W [i o] in x's dtype; if `wide` result and sums of gradients in float32 (float64).

  JAX takes a weight's gradient as (d^T x)^T, for which XLA copies d transposed on a CPU: a third of
  a gated MLP's gradient. And from a wide result it would go on in float32, TF32 on a GPU, half of
  bfloat16's speed: here all three products multiply in x's dtype.
  """
  dtype = wide_dtype(x.dtype) if wide else x.dtype
  return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=dtype)
