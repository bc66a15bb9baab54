"""Sizes of tiles: rounding, padding and the limits of a TPU."""

import jax
import jax.numpy as jnp

LANES = 128  # last dimension of a TPU vector register
SUBLANES = 8  # second to last, of 32-bit numbers
# Bytes of VMEM that one kernel may claim: half of v5p's (v5e and v6e have 128 MiB), twice what the
# largest one takes (`experiments.aot.kernel_report`).
TPU_VMEM_LIMIT = 32 * 2**20


def cdiv(a: int, b: int) -> int:
  """ceil(a / b)."""
  return -(-a // b)


def round_up(a: int, b: int) -> int:
  """The smallest multiple of b that is >= a."""
  return cdiv(a, b) * b


def pad_axis(x: jax.Array, axis: int, size: int, mode: str = "constant") -> jax.Array:
  """x with `axis` padded at its end to `size`, by zeros or (mode "edge") by its last element."""
  if x.shape[axis] == size:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, widths, mode=mode)
