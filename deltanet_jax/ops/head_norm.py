"""The norm of each head of an output, and its gate."""

from collections.abc import Callable
from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

from deltanet_jax.ops.checks import check_implementation
from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.norms import rms_norm

Implementation = Literal["plain", "pallas_gpu"]
_MAX_SIZE = 2048  # channels of a head: two tokens of them are a kernel's block


def head_norm(
  x: Float[Array, "B L n"],
  scale: Float[Array, " d"],
  eps: float,
  *,
  gate: Float[Array, "B L n"] | None = None,
  gate_activation: Callable | None = None,
  implementation: Implementation | None = None,
  interpret: bool = False,
) -> Float[Array, "B L n"]:
  """scale x / sqrt(mean(x^2) + eps) per d channels, times gate_activation(gate).

  Args:
    gate_activation: an activation, channel by channel.
    implementation: "plain" are operations of XLA, "pallas_gpu" is one pass forward and one
      backward. A named one runs or raises. None takes the fastest that the platform has.
    interpret: runs the Pallas kernel on the CPU.
  """
  if interpret and implementation != "pallas_gpu":
    raise ValueError(
      f"interpret=True is for Pallas kernels, and implementation {implementation!r} is none."
    )
  if _choose(implementation, x, scale, gate) == "plain":
    y = rms_norm(x, scale, eps)
    return y if gate is None else y * gate_activation(gate)
  # Imported when it is called: it is heavy.
  from pallas_kernels.head_norm import vjp

  return vjp.head_norm(x, scale, gate, eps, gate_activation, interpret=interpret)


def _choose(implementation, x, scale, gate):
  """The implementation of this name, which takes these inputs; of no name, the fastest."""
  if implementation is not None:
    check_implementation(implementation, get_args(Implementation))
  # There is none for a TPU, where `rms_norm` sums heads by products.
  fastest = "pallas_gpu" if target_platform() == "gpu" else "plain"
  chosen = implementation or fastest
  reason = _unsupported_reason(x, scale.shape[0], gate) if chosen == "pallas_gpu" else None
  if reason and implementation:
    raise ValueError(f'{reason}; use implementation="plain".')
  return "plain" if reason else chosen


def _unsupported_reason(x, size, gate):
  """Why the kernel does not take these inputs, in one sentence; None if it does."""
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    return f"a kernel takes bfloat16 or float32, got {x.dtype}"
  if gate is not None and gate.dtype != x.dtype:
    return f"a kernel takes a gate of x's dtype {x.dtype}, got {gate.dtype}"
  if x.shape[2] % size or size & (size - 1) or size > _MAX_SIZE:
    heads = f"{x.shape[2]} in heads of {size}"
    return f"a kernel takes heads of a power of two up to {_MAX_SIZE} channels, got {heads}"
  return None
