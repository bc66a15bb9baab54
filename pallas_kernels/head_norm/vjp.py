"""Norm of heads by kernels: layouts and derivatives."""

import jax.numpy as jnp

from pallas_kernels.common.differentiable import Kernels, by_kernels
from pallas_kernels.common.platform import only_on
from pallas_kernels.head_norm import pallas_gpu, reference

_NO_FORWARD_MODE = (
  "forward mode (jax.jvp, jax.hessian, jax.linearize) is for head_norm's implementation"
  ' "plain": its kernels have a backward by hand instead.'
)


def head_norm(x, scale, gate, eps, gate_activation, interpret=False):
  """scale x / sqrt(mean(x^2) + eps) gate_activation(gate) for every `size` channels.

  Args:
    x: [B, L, D], bfloat16 or float32.
    scale: [size], a power of two.
    gate: [B, L, D], or None for none.
    gate_activation: of float32 gates [tokens, channels].
  """
  x = x if interpret else only_on(x, "cuda", "head_norm")
  # The scale is given to each row: a member of a `vmap`, which is more rows, has its own.
  rows = jnp.broadcast_to(scale.astype(jnp.float32), (x.shape[0], *scale.shape))
  options = dict(eps=eps, gate_activation=gate_activation, size=scale.shape[0])
  run = lambda *args: (pallas_gpu.forward(*args, **options, interpret=interpret),)
  kernels = Kernels(
    run=run,
    save=lambda *args: (run(*args), ()),
    backward=lambda args, _, d: pallas_gpu.backward(*args, *d, **options, interpret=interpret),
    plain=lambda *args: (reference.head_norm(*args, **options),),
    unsupported_reason=_NO_FORWARD_MODE,
  )
  (y,) = by_kernels(kernels, x, rows, gate)
  return y
