"""Round, pad and respect TPU limits when choosing tile sizes."""

import jax
import jax.numpy as jnp

LANES = 128  # last dimension of a TPU vector register
SUBLANES = 8  # second-to-last dimension, for 32-bit elements
# VMEM bytes that one kernel may claim: half of v5p's VMEM (v5e and v6e have 128 MiB), about twice
# what the largest kernel needs (`experiments.aot.kernel_report`).
TPU_VMEM_LIMIT = 32 * 2**20


def cdiv(a: int, b: int) -> int:
  """Return ceil(a / b)."""
  return -(-a // b)


def round_up(a: int, b: int) -> int:
  """Return the smallest multiple of b that is >= a."""
  return cdiv(a, b) * b


def pad_axis(x: jax.Array, axis: int, size: int, mode: str = "constant") -> jax.Array:
  """Pad `axis` at its end to `size`, with zeros or (mode="edge") with its last element."""
  if x.shape[axis] == size:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, widths, mode=mode)
