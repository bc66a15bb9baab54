"""Matmul with weights, x W, with a custom VJP that avoids transposed copies."""

import itertools

import jax.numpy as jnp

from deltanet_jax.ops.dtypes import accum_dtype
from pallas_kernels.common.autodiff import custom_backward


def _backward(accumulate, args, d):
  x, kernel = args
  dtype = accum_dtype(x.dtype) if accumulate else x.dtype
  d = d.astype(x.dtype)
  dx = jnp.einsum("...o,io->...i", d, kernel.astype(x.dtype), preferred_element_type=dtype)
  dW = jnp.einsum("...i,...o->io", x, d, preferred_element_type=dtype)
  return dx.astype(x.dtype), dW.astype(kernel.dtype)


@custom_backward(_backward, static=(2,), inline=True)
def matmul(x, kernel, accumulate=False):
  """Multiply x [.. i] by a weight W [i o] in x's dtype.

  JAX computes a weight's gradient as (d^T x)^T, for which XLA copies d transposed on a CPU: a third
  of the time of a gated MLP's gradient. And after a float32 result it would compute the gradients'
  matmuls in float32, TF32 on a GPU at half the speed of bfloat16. Here all three matmuls multiply
  in x's dtype.

  Args:
    accumulate: Return the result, and sum the gradients, in the accumulation dtype.
  """
  dtype = accum_dtype(x.dtype) if accumulate else x.dtype
  return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=dtype)


def _concatenate(kernels, dtype):
  return jnp.concatenate([kernel.astype(dtype) for kernel in kernels], axis=1)


def _matmuls_backward(args, d):
  x, kernels = args
  dx, dW = _backward(False, (x, _concatenate(kernels, x.dtype)), d)
  ends = list(itertools.accumulate(kernel.shape[1] for kernel in kernels))
  parts = jnp.split(dW, ends[:-1], axis=1)
  return dx, [part.astype(kernel.dtype) for part, kernel in zip(parts, kernels)]


# Custom VJP: the concatenated weights are not a residual, which every layer would store.
@custom_backward(_matmuls_backward, inline=True)
def matmuls(x, kernels):
  """Multiply x [.. i] by the concatenation of weights [i o] in x's dtype: x is read once."""
  return jnp.matmul(x, _concatenate(kernels, x.dtype))
