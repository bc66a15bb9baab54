"""Rotary position embedding over the whole head, halves paired (i, i + d/2)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.dtypes import wide


def rope(
  x: Float[Array, "B L H d"], positions: Int[Array, "B L"], base: float = 10000.0
) -> Float[Array, "B L H d"]:
  """Turns the pair (x_i, x_{i+d/2}) of each head by the angle position * base^(-2i/d)."""
  half = x.shape[-1] // 2
  if x.shape[-1] % 2:
    raise ValueError(f"x has head size {x.shape[-1]}, expected an even one for rotary positions.")
  y = wide(x)
  frequencies = jnp.asarray(base ** (-np.arange(half) / half), y.dtype)
  angles = positions.astype(y.dtype)[:, :, None, None] * frequencies[None, None, None]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  a, b = y[..., :half], y[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
