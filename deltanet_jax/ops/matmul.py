"""x W for weights W, with backwards whose products need no transposed copies."""

import itertools

import jax.numpy as jnp

from deltanet_jax.ops.dtypes import accum_dtype
from pallas_kernels.common.autodiff import custom_backward


def _backward(wide, args, d):
  x, kernel = args
  dtype = accum_dtype(x.dtype) if wide else x.dtype
  d = d.astype(x.dtype)
  dx = jnp.einsum("...o,io->...i", d, kernel.astype(x.dtype), preferred_element_type=dtype)
  dW = jnp.einsum("...i,...o->io", x, d, preferred_element_type=dtype)
  return dx.astype(x.dtype), dW.astype(kernel.dtype)


@custom_backward(_backward, static=(2,), inline=True)
def matmul(x, kernel, wide=False):
  """x [.. i] by W [i o] in x's dtype; if `wide` result and sums of gradients in float32 (float64).

  JAX takes a weight's gradient as (d^T x)^T, for which XLA copies d transposed on a CPU: a third of
  a gated MLP's gradient. And from a wide result it would go on in float32, TF32 on a GPU, half of
  bfloat16's speed: here all three products multiply in x's dtype.
  """
  dtype = accum_dtype(x.dtype) if wide else x.dtype
  return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=dtype)


def _side_by_side(kernels, dtype):
  return jnp.concatenate([kernel.astype(dtype) for kernel in kernels], axis=1)


def _matmuls_backward(args, d):
  x, kernels = args
  dx, dW = _backward(False, (x, _side_by_side(kernels, x.dtype)), d)
  ends = list(itertools.accumulate(kernel.shape[1] for kernel in kernels))
  parts = jnp.split(dW, ends[:-1], axis=1)
  return dx, [part.astype(kernel.dtype) for part, kernel in zip(parts, kernels)]


# By hand: the weights side by side are no residual, which all layers would keep.
@custom_backward(_matmuls_backward, inline=True)
def matmuls(x, kernels):
  """x [.. i] by all of the weights [i o] side by side, in x's dtype: x is read once."""
  return jnp.matmul(x, _side_by_side(kernels, x.dtype))
