"""RWKV-4: per channel an average of all values, weighted by keys and a fixed decay."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, settings
from deltanet_jax.mixers.base import ONLY_LAYER, Layer, Mixer
from deltanet_jax.mixers.layers import Linear, param
from deltanet_jax.mixers.rwkv import falling, lerp, rising, share_before, spread, zigzag
from deltanet_jax.ops import empty_log_max_state, log_max_scan, token_shift
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.sharding import locally


@settings
class RWKV4Config(MixerConfig):
  kind: ClassVar[str] = "rwkv4"

  chunk: int = 64

  def validate(self):
    check_chunk(self.chunk)


class RWKV4(Mixer):
  """o_t = (A_{t-1} + e^{u + k_t} v_t) / (B_{t-1} + e^{u + k_t}) per channel, w <= 0 fixed.

  A_t = e^w A_{t-1} + e^{k_t} v_t, B_t alike with 1 for v_t; y_t = sigmoid(r_t) o_t.
  """

  Config = RWKV4Config
  # Not in the paper's table, so in its notation: α = e^w, one number per channel.
  recurrence = "s_t = α ⊙ s_{t-1} + exp(k_t) ⊙ v_t, z_t = α ⊙ z_{t-1} + exp(k_t)"
  readout = "o_t = σ(q_t) ⊙ (s_{t-1} + exp(d + k_t) ⊙ v_t) / (z_{t-1} + exp(d + k_t))"
  engine = "log_max_scan"
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
    del eps  # there is no norm inside
    self.cfg, self.width = cfg, width
    rise, fall = rising(layer), falling(layer)
    self.k_share = param(share_before(width, fall), "embed")
    self.v_share = param(share_before(width, fall, 0.3 * rise), "embed")
    self.r_share = param(share_before(width, 0.5 * fall), "embed")
    self.decay = param(spread(width, -5.0, 3.0, 0.7 + 1.3 * rise), "heads")
    self.bonus = param(math.log(0.3) + 0.5 * zigzag(width), "heads")
    make = lambda std: Linear((width, width), ("embed", "heads"), std=std, rngs=rngs)
    # Zeros: every token weighs the same at first, and a layer begins as the identity.
    self.k, self.v, self.r = make(0.0), make(std), make(0.0)
    self.out = Linear((width, width), ("heads", "embed"), std=0.0, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    S = empty_log_max_state(batch, self.width, accum_dtype(dtype))
    return dict(S=S, shift=jnp.zeros((batch, self.width), dtype))

  def recurrent_state(self):
    return 3 * self.width

  def flops(self, length):
    # Eleven to add a token to both sums in their units, as many to read with it, and a division.
    return 23 * self.width

  def mix(self, x, segment_ids, state):
    before = None if state is None else state["shift"]
    before, last = token_shift(x, state=before, segment_ids=segment_ids)
    k = self.k(lerp(x, before, self.k_share))
    v = self.v(lerp(x, before, self.v_share))
    r = jax.nn.sigmoid(self.r(lerp(x, before, self.r_share)))
    wide = accum_dtype(x.dtype)
    w, u = -jnp.exp(self.decay[...].astype(wide)), self.bonus[...].astype(wide)

    def scan(k, v, w, u, S0, segment_ids):
      form = "recurrent" if k.shape[1] == 1 else None
      options = dict(S0=S0, segment_ids=segment_ids, chunk=self.cfg.chunk, implementation=form)
      return log_max_scan(k, v, w, u, **options)

    # Channels are split as heads are.
    tokens, channels = ("batch", None, "mixing_heads"), ("mixing_heads",)
    names = (tokens, tokens, channels, channels, tokens, ("batch", None))
    S0 = None if state is None else state["S"]
    o, S = locally(scan, (k, v, w, u, S0, segment_ids), names, (tokens, tokens))
    return self.out(r * o), None if state is None else dict(S=S, shift=last)
