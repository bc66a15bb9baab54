"""Fused gated per-head RMSNorm on GPU, differentiable."""

import jax.numpy as jnp

from pallas_kernels.common.differentiable import KernelVJP, call_kernel
from pallas_kernels.common.platform import require_platform
from pallas_kernels.head_norm import pallas_gpu, reference


def head_norm(x, scale, gate, eps, gate_activation, interpret=False):
  """Return scale x / sqrt(mean(x^2) + eps) gate_activation(gate) for every `size` channels.

  Args:
    x: [B, L, D], bfloat16 or float32.
    scale: [size], size a power of two.
    gate: [B, L, D] or None.
    gate_activation: elementwise function of float32 gates [tokens, channels].
  """
  x = x if interpret else require_platform(x, "cuda", "head_norm")
  # One scale per batch element: `vmap` folds into the batch, and may batch the scale as well.
  scales = jnp.broadcast_to(scale.astype(jnp.float32), (x.shape[0], *scale.shape))
  options = dict(eps=eps, gate_activation=gate_activation, size=scale.shape[0])
  run = lambda *args: (pallas_gpu.forward(*args, **options, interpret=interpret),)
  kernel = KernelVJP(
    forward=run,
    forward_saving=lambda *args: (run(*args), ()),
    backward=lambda args, _, d: pallas_gpu.backward(*args, *d, **options, interpret=interpret),
    reference=lambda *args: (reference.head_norm(*args, **options),),
    name="head_norm",
  )
  (y,) = call_kernel(kernel, x, scales, gate)
  return y
