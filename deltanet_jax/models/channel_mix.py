"""RWKV's channel mix: an MLP on the current token interpolated with the previous one."""

import jax
import jax.numpy as jnp
from flax import nnx

from deltanet_jax.config import Mlp
from deltanet_jax.mixers.base import Layer
from deltanet_jax.mixers.layers import Linear, param
from deltanet_jax.mixers.rwkv import lerp, ratio_1_to_almost0, time_mix
from deltanet_jax.ops import token_shift

# Exponent of the initial weight of the previous token as it falls over layers.
_POWERS = {"rwkv4": 1, "rwkv6": 3}


class ChannelMix(nnx.Module):
  """sigmoid(x_r W_r) * (relu(x_k W_k)^2 W_v), x_k and x_r interpolated with the previous token."""

  def __init__(self, width: int, inner: int, version: Mlp, layer: Layer, *, std, rngs):
    share = time_mix(width, ratio_1_to_almost0(layer) ** _POWERS[version])
    self.k_share, self.r_share = param(share, "embed"), param(share, "embed")
    self.k = Linear((width, inner), ("embed", "mlp"), std=std, rngs=rngs)
    # Zeros: the layer is initially the identity.
    self.v = Linear((inner, width), ("mlp", "embed"), std=0.0, rngs=rngs)
    self.r = Linear((width, width), ("embed", None), std=0.0, rngs=rngs)

  def init_state(self, batch, dtype):
    return jnp.zeros((batch, self.k_share.shape[0]), dtype)

  def __call__(self, x, segment_ids, state):
    """Return (y, last token)."""
    previous, last = token_shift(x, state=state, segment_ids=segment_ids)
    k = jax.nn.relu(self.k(lerp(x, previous, self.k_share)))
    return jax.nn.sigmoid(self.r(lerp(x, previous, self.r_share))) * self.v(k * k), last
