"""Rotary position embedding over the whole head, halves paired (i, i + d/2)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.dtypes import wide
from pallas_kernels.autodiff import backward_by_hand


def rope(
  x: Float[Array, "B L H d"], positions: Int[Array, "B L"], base: float = 10000.0
) -> Float[Array, "B L H d"]:
  """Turns the pair (x_i, x_{i+d/2}) of each head by the angle position * base^(-2i/d)."""
  if x.shape[-1] % 2:
    raise ValueError(f"x has head size {x.shape[-1]}, expected an even one for rotary positions.")
  return _turn(x, positions, base)


# The gradient is turned back: JAX's own would write halves of heads in float32.
def _turn_backward(base, args, d):
  _, positions = args
  return _turn(d, -positions, base), None


@backward_by_hand(_turn_backward, static=(2,))
def _turn(x, positions, base):
  half = x.shape[-1] // 2
  y = wide(x)
  frequencies = jnp.asarray(base ** (-np.arange(half) / half), y.dtype)
  angles = positions.astype(y.dtype)[:, :, None, None] * frequencies[None, None, None]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  a, b = y[..., :half], y[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
