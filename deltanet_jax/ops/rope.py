"""Rotary position embedding (RoPE) over the full head, halves paired (i, i + d/2)."""

from jaxtyping import Array, Float, Int

from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from pallas_kernels.common.autodiff import custom_backward
from pallas_kernels.rope.reference import rotate, unsupported_reason


def rope(
  x: Float[Array, "B L H d"],
  positions: Int[Array, "B L"],
  base: float = 10000.0,
  *,
  implementation: str | None = None,
  interpret: bool = False,
) -> Float[Array, "B L H d"]:
  """Apply the rotary position embedding to queries or keys.

  Rotates the pair (x_i, x_{i+d/2}) of each head by the angle position * base^(-2i/d).

  Args:
    x: Queries or keys.
    positions: Position of each token.
    base: Base of the frequencies.
    implementation: "plain" (XLA operations) or "pallas_tpu" (one pass over x, which XLA would copy
      into another layout and back). A named implementation runs or raises. None selects the kernel
      on a TPU for sequences that it supports; for one decoding token it is not worth a launch.
    interpret: Run the Pallas kernel in interpret mode on the CPU.
  """
  if x.shape[-1] % 2:
    raise ValueError(f"x has head size {x.shape[-1]}, expected an even one for rotary positions.")
  entry = ROPE.resolve(implementation, x, interpret=interpret)
  return entry.run(x, positions, base, interpret)


def _pallas_tpu(x, positions, base, interpret):
  from pallas_kernels.rope.pallas_tpu import rotate_tpu  # slow to import

  return rotate_tpu(x, positions, base, interpret)


# The gradient is rotated back: autodiff would write halves of heads in float32.
def _rotate_backward(base, args, d):
  _, positions = args
  return _rotate(d, -positions, base), None


@custom_backward(_rotate_backward, static=(2,))
def _rotate(x, positions, base):
  return rotate(x, positions, base)


def _plain(x, positions, base, interpret):
  del interpret
  return _rotate(x, positions, base)


ROPE = Operator(
  "rope",
  {
    "pallas_tpu": Entry(
      run=_pallas_tpu,
      default_on=("tpu",),
      default_if=lambda x: x.shape[1] > 1,
      unsupported_reason=unsupported_reason,
      interpretable=True,
      forward_mode=False,
    ),
    "plain": Entry(run=_plain, default_on=PLATFORMS),
  },
)
