"""Short convolutions by kernels: layouts and derivatives."""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.differentiable import Kernels, by_kernels
from pallas_kernels.common.platform import only_on
from pallas_kernels.short_conv import pallas_gpu, pallas_tpu, reference

_NO_FORWARD_MODE = (
  "forward mode (jax.jvp, jax.hessian, jax.linearize) is for short_conv's implementation"
  ' "plain": its kernels have a backward by hand instead.'
)


def short_conv_tpu(x, kernel, bias, ages, epilogue, size, interpret=False):
  """epilogue(sum_i kernel_i x_{t-W+1+i} + bias) for every `size` channels, on TPU.

  Args:
    x: [B, L, D], bfloat16 or float32.
    kernel: [W, D].
    bias: [D] or None.
    ages: [B, L] int32, tokens before one in its segment, or None for one segment.
    epilogue: (y, total) -> z, of float32 y and total, which sums every `size` channels.
    size: a divisor or a multiple of 128.
  """
  x = x if interpret else only_on(x, "tpu", "short_conv")
  options = dict(epilogue=epilogue, size=size, width=kernel.shape[0])
  run = functools.partial(pallas_tpu.forward, **options, interpret=interpret)

  def backward(args, _, cotangents):
    return *pallas_tpu.backward(*args, *cotangents, **options, interpret=interpret), None

  kernels = Kernels(
    run=lambda *args: (run(*args),),
    save=lambda *args: ((run(*args),), ()),
    backward=backward,
    plain=lambda *args: (reference.short_conv(*args, **options),),
    unsupported_reason=_NO_FORWARD_MODE,
  )
  (y,) = by_kernels(kernels, x, _taps(x, kernel, bias), ages)
  return y


def short_convs_gpu(x, kernel, bias, ages, parts, interpret=False):
  """The same on GPU for parts of x's channels, one after the other.

  Args:
    x: [B, L, D + ..]: the parts' channels, and others.
    parts: (epilogue, size, channels) of each, the size a power of two.

  Returns:
    A result for each part, and x's other channels as they are.
  """
  x = x if interpret else only_on(x, "cuda", "short_conv")
  parts = tuple(pallas_gpu.Part(*part) for part in parts)
  options, D = dict(parts=parts, width=kernel.shape[0]), kernel.shape[1]

  def run(x, taps, ages):
    return *pallas_gpu.forward(x, taps, ages, **options, interpret=interpret), x[..., D:]

  def backward(args, _, cotangents):
    *ds, others = cotangents
    dx, dtaps = pallas_gpu.backward(*args, ds, **options, interpret=interpret)
    # In place: dx is one array, so that what made x has one product to differentiate.
    return lax.dynamic_update_slice(dx, others, (0, 0, D)), dtaps, None

  kernels = Kernels(
    run=run,
    save=lambda *args: (run(*args), ()),
    backward=backward,
    plain=lambda x, *args: (*reference.short_convs(x, *args, **options), x[..., D:]),
    unsupported_reason=_NO_FORWARD_MODE,
  )
  return by_kernels(kernels, x, _taps(x, kernel, bias), ages)


def _taps(x, kernel, bias):
  """The current token's first; given to each row: a member of a `vmap`, more rows, has its own."""
  taps = kernel.astype(jnp.float32)[::-1]
  taps = taps if bias is None else jnp.concatenate([taps, bias.astype(jnp.float32)[None]])
  return jnp.broadcast_to(taps, (x.shape[0], *taps.shape))
