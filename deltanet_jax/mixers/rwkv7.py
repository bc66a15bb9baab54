"""RWKV-7 (Goose): generalized delta rule, with per-channel decay and in-context learning rate."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.base import ONLY_LAYER, Layer, count_heads
from deltanet_jax.mixers.layers import Linear, LowRank, merge_heads, param, per_head, split_heads
from deltanet_jax.mixers.matrix_state import DPLRMixer
from deltanet_jax.mixers.rwkv import (
  RWKVMixer,
  lerp,
  power_ramp,
  ratio_0_to_1,
  ratio_1_to_almost0,
  small_std,
  time_mix,
)
from deltanet_jax.ops import l2_norm, token_shift
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dplr import DPLR
from deltanet_jax.ops.dtypes import accum_dtype


@settings
class RWKV7Config(MixerConfig):
  kind: ClassVar[str] = "rwkv7"

  head_size: int = setting(64, "Key and value size per head; divides the width.")
  decay_rank: int | None = setting(
    None, "Rank of the decay; None: 2.5 sqrt(width), rounded to a multiple of 32."
  )
  rate_rank: int | None = setting(
    None, "Rank of the in-context learning rate; None: 2.5 sqrt(width), rounded likewise."
  )
  gate_rank: int | None = setting(
    None, "Rank of the output gate; None: 5 sqrt(width), rounded likewise."
  )
  chunk: int = setting(32, "Chunk size of the chunkwise form in tokens.")
  implementation: str | None = setting(
    None, "Implementation of the operator dplr; None: chunkwise."
  )

  def validate(self):
    check_positive(self, "head_size", "decay_rank", "rate_rank", "gate_rank")
    check_chunk(self.chunk)
    DPLR.check_name(self.implementation)


class RWKV7(RWKVMixer, DPLRMixer):
  """S_t = Diag(e^{w_t}) S_{t-1} - (eta_t * kappa_t)^T kappa_t S_{t-1} + k_t^T v_t, o_t = r_t S_t.

  kappa_t has norm 1. The bonus r_t (rho * k_t)^T v_t is added after the norm. RWKV-7's value
  residual from the first layer is not implemented: a mixer sees only its own layer.
  """

  Config = RWKV7Config
  recurrence = "S_t = S_{t-1} (Diag(α_t) - κ_t (η_t ⊙ κ_t)ᵀ) + v_t k_tᵀ"
  readout = "o_t = S_t q_t"

  def __init__(
    self,
    cfg: RWKV7Config,
    width: int,
    *,
    layer: Layer = ONLY_LAYER,
    eps: float = 1e-6,
    std: float = 0.02,
    rngs,
  ):
    del eps  # the output norm has its own
    self.cfg = cfg
    self.heads = count_heads(width, head_size=cfg.head_size)
    self.key_size = self.value_size = cfg.head_size
    rising, falling = ratio_0_to_1(layer), ratio_1_to_almost0(layer)
    # Token-shift weights of r, w, k, v, eta and the gate (RWKV's x_r .. x_g).
    shares = [time_mix(width, power * falling) for power in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]
    self.shares = param(jnp.stack(shares), None, "embed", decays=False)
    small = small_std(width)
    make = lambda std: Linear((width, width), ("embed", "heads"), std=std, rngs=rngs)
    self.r, self.k, self.v = make(std), make(small), make(std)

    def low_rank(rank, factor, act=None):
      rank = rank or max(32 * round(factor * math.sqrt(width) / 32), 32)
      return LowRank(width, rank, width, std=small, rngs=rngs, act=act, down_std=0.0)

    self.decay = low_rank(cfg.decay_rank, 2.5, jnp.tanh)
    self.rate = low_rank(cfg.rate_rank, 2.5)
    self.gate = low_rank(cfg.gate_rank, 5.0, jax.nn.sigmoid)
    linear, zigzag = power_ramp(width, -0.5, 0.5, 1), _head_zigzag(width, cfg.head_size)
    decay = power_ramp(width, -6.0, 0.0, 1 + rising**0.3) + 0.5 + 2.5 * zigzag
    # RWKV's names: w0, a0, k_k (key of the correction), k_a (key that is written) and r_k.
    self.decay_bias = param(decay, "heads")
    self.rate_bias = param(-0.19 + 0.3 * zigzag + 0.4 * linear, "heads")
    self.erased = param(0.71 - 0.1 * linear, "heads")
    self.written = param(jnp.full(width, 1.02), "heads")
    self.bonus = param(jnp.full(width, -0.04), "heads")
    self.norm = self.make_norm(layer, eps=1e-5 * cfg.head_size)
    self.out = Linear((width, width), ("heads", "embed"), std=0.0, rngs=rngs)

  def mix(self, x, segment_ids, state):
    accum = accum_dtype(x.dtype)
    previous = None if state is None else state["shift"]
    previous, last = token_shift(x, state=previous, segment_ids=segment_ids)
    x_r, x_w, x_k, x_v, x_a, x_g = (lerp(x, previous, share) for share in self.shares[...])
    channels = lambda w, dtype: w[...].astype(dtype)[None, None]
    gate_activation = lambda y, bias: jax.nn.sigmoid(y.astype(accum) + channels(bias, accum))
    r, k, v = self.r(x_r), self.k(x_k), self.v(x_v)
    w = -math.exp(-0.5) * gate_activation(self.decay(x_w), self.decay_bias)
    eta = gate_activation(self.rate(x_a), self.rate_bias)
    norm = lambda y: l2_norm(y, self.key_size)
    kappa = per_head(norm, k * channels(self.erased, x.dtype), self.key_size)
    # A channel with eta = 1 (full correction) writes its full key.
    k = k * (1 + (eta - 1) * channels(self.written, accum)).astype(x.dtype)
    split = lambda y: split_heads(y, self.heads)
    inputs = (split(y) for y in (r, k, v, kappa, (kappa * eta.astype(x.dtype)), w))
    o, S = self.run(*inputs, segment_ids, state, scale=1.0)
    own = split((r * k * channels(self.bonus, x.dtype)).astype(accum)).sum(axis=-1, keepdims=True)
    o = self.norm(o) + merge_heads(own.astype(x.dtype) * split(v))
    y = self.out(o * self.gate(x_g))
    return y, None if state is None else dict(S=S, shift=last)


def _head_zigzag(width, head_size):
  """z |z| with z from -1 in the first channel of each head to 1 in its last."""
  z = jnp.arange(width, dtype=jnp.float32) % head_size
  z = 2 * z / max(head_size - 1, 1) - 1
  return z * jnp.abs(z)
