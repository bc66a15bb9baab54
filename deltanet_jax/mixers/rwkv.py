"""What the layers of RWKV share: tokens mixed with the ones before, by how much at first."""

import jax.numpy as jnp

from deltanet_jax.mixers.base import Layer


def lerp(x, before, share):
  """x with a share of each channel from the token before; the share `[D]` or `[B L D]`."""
  share = share[...].astype(x.dtype)
  return x + (before - x) * share.reshape((1,) * (x.ndim - share.ndim) + share.shape)


def rising(layer: Layer):
  """0 in the first layer, 1 in the last."""
  return jnp.asarray(layer.index, jnp.float32) / max(layer.depth - 1, 1)


def falling(layer: Layer):
  """1 in the first layer, 1 / depth in the last."""
  return 1 - jnp.asarray(layer.index, jnp.float32) / layer.depth


def share_before(width, power, more=0.0):
  """1 - (i / D)^power - more for channel i: at first the token before is for early channels."""
  return 1 - (jnp.arange(width, dtype=jnp.float32) / width) ** power - more


def spread(width, low, high, power):
  """From `low` in the first channel to `high` in the last, curved by the power."""
  at = jnp.arange(width, dtype=jnp.float32) / max(width - 1, 1)
  return low + (high - low) * at**power


def zigzag(width):
  """-1, 0 and 1 in turn, beginning with 0."""
  return ((jnp.arange(width) + 1) % 3 - 1).astype(jnp.float32)
