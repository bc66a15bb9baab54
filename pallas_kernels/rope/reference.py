"""Rotary position embeddings in plain JAX, the definition; does not import Pallas."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.tiling import LANES

F32 = jnp.float32


def angles_of(positions, half, base, dtype):
  """Return positions * base^(-i / half) for i < half, [B, L, half]."""
  frequencies = jnp.asarray(base ** (-np.arange(half) / half), dtype)
  return positions.astype(dtype)[..., None] * frequencies[None, None]


def rotate(x, positions, base):
  """Rotate the pairs (x_i, x_{i+d/2}) of each head of x [B L H d] by position * base^(-2i/d)."""
  half = x.shape[-1] // 2
  y = x.astype(jnp.float64 if x.dtype == jnp.float64 else F32)
  angles = angles_of(positions, half, base, y.dtype)[:, :, None]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  a, b = y[..., :half], y[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def unsupported_reason(x) -> str | None:
  """Return why the kernel does not support x [B L H d], or None if it does."""
  H, d = x.shape[2:]
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    return f"the kernel takes bfloat16 or float32, got {x.dtype}"
  if (H * d) % LANES or (d % LANES and LANES % d):
    return f"the kernel takes full groups of {LANES} channels, got {H} heads of {d}"
  return None
