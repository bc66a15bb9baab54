"""Short convolutions fused with their epilogue, on TPU and GPU, differentiable."""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.differentiable import KernelVJP, call_kernel
from pallas_kernels.common.platform import require_platform
from pallas_kernels.short_conv import pallas_gpu, pallas_tpu, reference


def short_conv_tpu(x, kernel, bias, positions, epilogue, size, interpret=False):
  """Return epilogue(sum_i kernel_i x_{t-W+1+i} + bias) for every `size` channels, on TPU.

  Args:
    x: [B, L, D], bfloat16 or float32.
    kernel: [W, D].
    bias: [D] or None.
    positions: [B, L] int32, of each token in its segment, or None for one segment.
    epilogue: (y, total) -> z, with float32 y and total(x) summing every `size` channels.
    size: a divisor or a multiple of 128.
  """
  x = x if interpret else require_platform(x, "tpu", "short_conv")
  options = dict(epilogue=epilogue, size=size, width=kernel.shape[0])
  run = functools.partial(pallas_tpu.forward, **options, interpret=interpret)

  def backward(args, _, cotangents):
    return *pallas_tpu.backward(*args, *cotangents, **options, interpret=interpret), None

  conv = KernelVJP(
    forward=lambda *args: (run(*args),),
    forward_saving=lambda *args: ((run(*args),), ()),
    backward=backward,
    reference=lambda *args: (reference.short_conv(*args, **options),),
    name="short_conv",
  )
  (y,) = call_kernel(conv, x, _taps(x, kernel, bias), positions)
  return y


def short_convs_gpu(x, kernel, bias, positions, parts, interpret=False):
  """Convolve consecutive parts of the channels of x on GPU, each with its own epilogue.

  Args:
    x: [B, L, D + extra]: the channels of the parts, then channels that are passed through.
    kernel, bias, positions: as in `short_conv_tpu`, with D the channels of all parts.
    parts: (epilogue, head size, channels) of each part; the head size is a power of two.

  Returns:
    One array per part, and the extra channels of x unchanged.
  """
  x = x if interpret else require_platform(x, "cuda", "short_conv")
  parts = tuple(pallas_gpu.Part(*part) for part in parts)
  options, D = dict(parts=parts, width=kernel.shape[0]), kernel.shape[1]

  def run(x, taps, positions):
    return *pallas_gpu.forward(x, taps, positions, **options, interpret=interpret), x[..., D:]

  def backward(args, _, cotangents):
    *ds, others = cotangents
    dx, dtaps = pallas_gpu.backward(*args, ds, **options, interpret=interpret)
    # In place: dx is one array, so that the projection that made x has one matmul per gradient.
    return lax.dynamic_update_slice(dx, others, (0, 0, D)), dtaps, None

  conv = KernelVJP(
    forward=run,
    forward_saving=lambda *args: (run(*args), ()),
    backward=backward,
    reference=lambda x, *args: (*reference.short_convs(x, *args, **options), x[..., D:]),
    name="short_conv",
  )
  return call_kernel(conv, x, _taps(x, kernel, bias), positions)


def _taps(x, kernel, bias):
  """Return [B, width (+ 1), D]: taps, the current token's first, then the bias.

  One copy per batch element: `vmap` folds into the batch, and may batch the taps as well.
  """
  taps = kernel.astype(jnp.float32)[::-1]
  taps = taps if bias is None else jnp.concatenate([taps, bias.astype(jnp.float32)[None]])
  return jnp.broadcast_to(taps, (x.shape[0], *taps.shape))
