"""Gated per-head RMSNorm of a mixer's output."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from deltanet_jax.ops.norms import rms_norm

_MAX_SIZE = 2048  # channels of a head: a block of the kernel holds two tokens of one head


def head_norm(
  x: Float[Array, "B L n"],
  scale: Float[Array, " d"],
  eps: float,
  *,
  gate: Float[Array, "B L n"] | None = None,
  gate_activation: Callable | None = None,
  implementation: str | None = None,
  interpret: bool = False,
) -> Float[Array, "B L n"]:
  """Apply RMSNorm to each head and multiply by an activated gate.

  y = scale x / sqrt(mean(x^2) + eps) per d channels, times gate_activation(gate).

  Args:
    x: Heads of d channels each, concatenated.
    scale: Weights of the norm, shared by all heads.
    eps: Added to the mean square.
    gate: Gate of each channel, None for none.
    gate_activation: Elementwise activation of the gate.
    implementation: "plain" (XLA operations) or "pallas_gpu" (fused, one pass forward and one
      backward). A named implementation runs or raises. None selects the platform's fastest.
    interpret: Run the Pallas kernel in interpret mode on the CPU.
  """
  entry = HEAD_NORM.resolve(implementation, x, scale, gate, interpret=interpret)
  return entry.run(x, scale, gate, eps, gate_activation, interpret)


def _plain(x, scale, gate, eps, gate_activation, interpret):
  del interpret
  y = rms_norm(x, scale, eps)
  return y if gate is None else y * gate_activation(gate)


def _pallas_gpu(x, scale, gate, eps, gate_activation, interpret):
  from pallas_kernels.head_norm.vjp import head_norm  # slow to import

  return head_norm(x, scale, gate, eps, gate_activation, interpret=interpret)


def _pallas_gpu_reason(x, scale, gate):
  size = scale.shape[0]
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    return f"a kernel takes bfloat16 or float32, got {x.dtype}"
  if gate is not None and gate.dtype != x.dtype:
    return f"a kernel takes a gate of x's dtype {x.dtype}, got {gate.dtype}"
  if x.shape[2] % size or size & (size - 1) or size > _MAX_SIZE:
    heads = f"{x.shape[2]} in heads of {size}"
    return f"a kernel takes heads of a power of two up to {_MAX_SIZE} channels, got {heads}"
  return None


HEAD_NORM = Operator(
  "head_norm",
  {
    # There is no TPU kernel: `rms_norm` sums heads by matmuls there.
    "pallas_gpu": Entry(
      run=_pallas_gpu,
      default_on=("gpu",),
      unsupported_reason=_pallas_gpu_reason,
      interpretable=True,
      forward_mode=False,
    ),
    "plain": Entry(run=_plain, default_on=PLATFORMS),
  },
)
