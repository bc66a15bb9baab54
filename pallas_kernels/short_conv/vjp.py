"""Short convolution by kernels: layouts and derivatives."""

import functools

import jax.numpy as jnp

from pallas_kernels.differentiable import Kernels, by_kernels
from pallas_kernels.platform import only_on
from pallas_kernels.short_conv import pallas_gpu, pallas_tpu, plain

_NO_FORWARD_MODE = (
  "forward mode (jax.jvp, jax.hessian, jax.linearize) is for short_conv's implementation"
  ' "plain": its kernels have a backward by hand instead.'
)


_KERNELS = {"tpu": pallas_tpu, "cuda": pallas_gpu}


def short_conv(platform, x, kernel, bias, ages, finish, size, interpret=False):
  """finish(sum_i kernel_i x_{t-W+1+i} + bias) for every `size` channels.

  Args:
    platform: "tpu" or "cuda".
    x: [B, L, D], bfloat16 or float32.
    kernel: [W, D].
    bias: [D] or None.
    ages: [B, L] int32, tokens before one in its document, or None for one document.
    finish: (y, total) -> z, of float32 y and total, which sums every `size` channels.
    size: a divisor or a multiple of 128 (TPU), a power of two (GPU).
  """
  by, x = _KERNELS[platform], x if interpret else only_on(x, platform, "short_conv")
  # Taps are given to each row: a member of a `vmap`, which is more rows, has its own.
  taps = kernel.astype(jnp.float32)[::-1]
  taps = taps if bias is None else jnp.concatenate([taps, bias.astype(jnp.float32)[None]])
  taps = jnp.broadcast_to(taps, (x.shape[0], *taps.shape))
  options = dict(finish=finish, size=size, width=kernel.shape[0])
  run = functools.partial(by.forward, **options, interpret=interpret)

  def backward(args, _, cotangents):
    return *by.backward(*args, *cotangents, **options, interpret=interpret), None

  kernels = Kernels(
    run=lambda *args: (run(*args),),
    save=lambda *args: ((run(*args),), ()),
    backward=backward,
    plain=lambda *args: (plain.short_conv(*args, **options),),
    refusal=_NO_FORWARD_MODE,
  )
  (y,) = by_kernels(kernels, x, taps, ages)
  return y
