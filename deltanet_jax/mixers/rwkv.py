"""Parts that the RWKV layers share: interpolation with the previous token, and initial values.

Initializers follow the published training code and keep its names (`ratio_0_to_1`, `zigzag`).
"""

import jax.numpy as jnp

from deltanet_jax.mixers.base import Layer
from deltanet_jax.mixers.layers import HeadLayerNorm
from deltanet_jax.mixers.matrix_state import MatrixStateMixer
from deltanet_jax.ops.dtypes import accum_dtype


def lerp(x, previous, mix):
  """Interpolate linearly between each token and the previous one: x + (previous - x) * mix.

  Args:
    mix: weight of the previous token per channel, `[D]` or `[B L D]`.
  """
  mix = mix[...].astype(x.dtype)
  return x + (previous - x) * mix.reshape((1,) * (x.ndim - mix.ndim) + mix.shape)


def ratio_0_to_1(layer: Layer):
  """l / (depth - 1): 0 in the first layer, 1 in the last."""
  return jnp.asarray(layer.index, jnp.float32) / max(layer.depth - 1, 1)


def ratio_1_to_almost0(layer: Layer):
  """1 - l / depth: 1 in the first layer, 1 / depth in the last."""
  return 1 - jnp.asarray(layer.index, jnp.float32) / layer.depth


def time_mix(width, power, offset=0.0):
  """1 - (i / D)^power - offset for channel i: initial weight of the previous token in `lerp`."""
  return 1 - (jnp.arange(width, dtype=jnp.float32) / width) ** power - offset


def power_ramp(width, low, high, power):
  """low + (high - low) (i / (D - 1))^power for channel i."""
  at = jnp.arange(width, dtype=jnp.float32) / max(width - 1, 1)
  return low + (high - low) * at**power


def zigzag(width):
  """(i + 1) mod 3 - 1 for channel i: 0, 1, -1, 0, 1, -1, ..."""
  return ((jnp.arange(width) + 1) % 3 - 1).astype(jnp.float32)


def small_std(width):
  """Standard deviation of the entries of 0.1 Q, where Q is an orthogonal D x D matrix."""
  return 0.1 * width**-0.5


class RWKVMixer(MatrixStateMixer):
  """RWKV-6 and RWKV-7: S `[d d]` per head; the decoding state also has the last token."""

  by_layer = True

  def init_state(self, batch, max_length, dtype):
    H, d = self.heads, self.key_size
    last = jnp.zeros((batch, H * d), dtype)
    return dict(S=jnp.zeros((batch, H, d, d), accum_dtype(dtype)), shift=last)

  def make_norm(self, layer: Layer, *, eps: float) -> HeadLayerNorm:
    """Per-head LayerNorm of the output, with the initial scale ((l + 1) / depth)^0.7 in layer l."""
    scale = ((1 + jnp.asarray(layer.index, jnp.float32)) / layer.depth) ** 0.7
    return HeadLayerNorm(self.heads, self.key_size, eps=eps, bias=True, scale=scale)
