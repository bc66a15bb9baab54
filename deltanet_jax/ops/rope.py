"""Rotary position embedding over the whole head, halves paired (i, i + d/2)."""

from typing import Literal, get_args

from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import check_implementation
from deltanet_jax.ops.dispatch import target_platform
from pallas_kernels.common.autodiff import custom_backward
from pallas_kernels.rope.reference import turn, unsupported_reason

Implementation = Literal["plain", "pallas_tpu"]


def rope(
  x: Float[Array, "B L H d"],
  positions: Int[Array, "B L"],
  base: float = 10000.0,
  *,
  implementation: Implementation | None = None,
  interpret: bool = False,
) -> Float[Array, "B L H d"]:
  """Turns the pair (x_i, x_{i+d/2}) of each head by the angle position * base^(-2i/d).

  Args:
    implementation: "plain" are operations of XLA, "pallas_tpu" one pass over x, which XLA would
      copy into another layout and back. A named one runs or raises; None takes the kernel on a TPU
      for what it serves.
    interpret: runs the Pallas kernel on the CPU.
  """
  if x.shape[-1] % 2:
    raise ValueError(f"x has head size {x.shape[-1]}, expected an even one for rotary positions.")
  if implementation is not None:
    check_implementation(implementation, get_args(Implementation))
  if interpret and implementation != "pallas_tpu":
    raise ValueError(
      f"interpret=True is for Pallas kernels, and implementation {implementation!r} is none."
    )
  reason = unsupported_reason(x)
  if implementation == "pallas_tpu" and reason:
    raise ValueError(f'{reason}; use implementation="plain".')
  # A decoding token is no work for a kernel.
  on_tpu = target_platform() == "tpu" and x.shape[1] > 1 and not reason
  if implementation == "pallas_tpu" or (implementation is None and on_tpu):
    from pallas_kernels.rope.pallas_tpu import turn_tpu  # when it is called: it is heavy

    return turn_tpu(x, positions, base, interpret)
  return _plain(x, positions, base)


# The gradient is turned back: JAX's own would write halves of heads in float32.
def _plain_backward(base, args, d):
  _, positions = args
  return _plain(d, -positions, base), None


@custom_backward(_plain_backward, static=(2,))
def _plain(x, positions, base):
  return turn(x, positions, base)
