"""RWKV-4: per channel an average of all values, weighted by exp(key) and a constant decay."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, setting, settings
from deltanet_jax.mixers.base import ONLY_LAYER, Layer, Mixer
from deltanet_jax.mixers.layers import Linear, param
from deltanet_jax.mixers.rwkv import (
  lerp,
  power_ramp,
  ratio_0_to_1,
  ratio_1_to_almost0,
  time_mix,
  zigzag,
)
from deltanet_jax.ops import empty_log_max_state, log_max_scan, token_shift
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.sharding import locally


@settings
class RWKV4Config(MixerConfig):
  kind: ClassVar[str] = "rwkv4"

  chunk: int = setting(64, "Chunk size of the associative scan in tokens.")

  def validate(self):
    check_chunk(self.chunk)


class RWKV4(Mixer):
  """o_t = (A_{t-1} + e^{u + k_t} v_t) / (B_{t-1} + e^{u + k_t}) per channel, with constant w <= 0.

  A_t = e^w A_{t-1} + e^{k_t} v_t, B_t = e^w B_{t-1} + e^{k_t}; y_t = sigmoid(r_t) o_t.
  """

  Config = RWKV4Config
  # Not in the paper's table, but in its notation: α = e^w, one number per channel.
  recurrence = "s_t = α ⊙ s_{t-1} + exp(k_t) ⊙ v_t, z_t = α ⊙ z_{t-1} + exp(k_t)"
  readout = "o_t = σ(q_t) ⊙ (s_{t-1} + exp(d + k_t) ⊙ v_t) / (z_{t-1} + exp(d + k_t))"
  operator = "log_max_scan"
  efficient_form = "associative scan in chunks"
  by_layer = True

  def __init__(
    self,
    cfg: RWKV4Config,
    width: int,
    *,
    layer: Layer = ONLY_LAYER,
    eps: float = 1e-6,
    std: float = 0.02,
    rngs,
  ):
    del eps  # no norm in this mixer
    self.cfg, self.width = cfg, width
    rising, falling = ratio_0_to_1(layer), ratio_1_to_almost0(layer)
    self.k_share = param(time_mix(width, falling), "embed")
    self.v_share = param(time_mix(width, falling, 0.3 * rising), "embed")
    self.r_share = param(time_mix(width, 0.5 * falling), "embed")
    self.decay = param(power_ramp(width, -5.0, 3.0, 0.7 + 1.3 * rising), "heads")
    self.bonus = param(math.log(0.3) + 0.5 * zigzag(width), "heads")
    make = lambda std: Linear((width, width), ("embed", "heads"), std=std, rngs=rngs)
    # Zeros: initially all tokens have equal weight, and the layer is the identity.
    self.k, self.v, self.r = make(0.0), make(std), make(0.0)
    self.out = Linear((width, width), ("heads", "embed"), std=0.0, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    S = empty_log_max_state(batch, self.width, accum_dtype(dtype))
    return dict(S=S, shift=jnp.zeros((batch, self.width), dtype))

  def recurrent_state(self):
    return 3 * self.width

  def flops(self, length):
    # 11 to add a token to both rescaled sums, 11 to read them with the bonus, and one division.
    return 23 * self.width

  def mix(self, x, segment_ids, state):
    previous = None if state is None else state["shift"]
    previous, last = token_shift(x, state=previous, segment_ids=segment_ids)
    k = self.k(lerp(x, previous, self.k_share))
    v = self.v(lerp(x, previous, self.v_share))
    r = jax.nn.sigmoid(self.r(lerp(x, previous, self.r_share)))
    accum = accum_dtype(x.dtype)
    w, u = -jnp.exp(self.decay[...].astype(accum)), self.bonus[...].astype(accum)

    def scan(k, v, w, u, S0, segment_ids):
      form = "recurrent" if k.shape[1] == 1 else None
      options = dict(S0=S0, segment_ids=segment_ids, chunk=self.cfg.chunk, implementation=form)
      return log_max_scan(k, v, w, u, **options)

    # Channels are sharded like heads.
    tokens, channels = ("batch", None, "mixing_heads"), ("mixing_heads",)
    names = (tokens, tokens, channels, channels, tokens, ("batch", None))
    S0 = None if state is None else state["S"]
    o, S = locally(scan, (k, v, w, u, S0, segment_ids), names, (tokens, tokens))
    return self.out(r * o), None if state is None else dict(S=S, shift=last)
