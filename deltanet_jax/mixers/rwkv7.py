"""RWKV-7 (Goose): a generalised delta rule, with a decay and a rate of erasing per key channel."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check, check_positive, settings
from deltanet_jax.mixers.base import ONLY_LAYER, Layer
from deltanet_jax.mixers.layers import Linear, LowRank, merge_heads, param, per_head, split_heads
from deltanet_jax.mixers.matrix_state import DPLRMixer
from deltanet_jax.mixers.norms import HeadLayerNorm
from deltanet_jax.mixers.rwkv import falling, lerp, rising, share_before, spread
from deltanet_jax.ops import l2_norm, token_shift
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dplr import DPLR
from deltanet_jax.ops.dtypes import accum_dtype


@settings
class RWKV7Config(MixerConfig):
  kind: ClassVar[str] = "rwkv7"

  head_size: int = 64
  # Ranks grow with the root of the width if None: 2.5, 2.5 and 5 times it, in steps of 32.
  decay_rank: int | None = None
  rate_rank: int | None = None
  gate_rank: int | None = None
  chunk: int = 32
  implementation: str | None = None  # None: "chunkwise"

  def validate(self):
    check_positive(self, "head_size", "decay_rank", "rate_rank", "gate_rank")
    check_chunk(self.chunk)
    DPLR.check_name(self.implementation)


class RWKV7(DPLRMixer):
  """S_t = Diag(e^{w_t}) S_{t-1} - (eta_t * kappa_t)^T kappa_t S_{t-1} + k_t^T v_t, o_t = r_t S_t.

  kappa_t has norm 1. After the norm, a bonus r_t (rho * k_t)^T v_t is added. RWKV-7's mixing of a
  layer's values with those of the first layer is not here: a mixer sees its own layer alone.
  """

  Config = RWKV7Config
  recurrence = "S_t = S_{t-1} (Diag(α_t) - κ_t (η_t ⊙ κ_t)ᵀ) + v_t k_tᵀ"
  readout = "o_t = S_t q_t"
  by_layer = True

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
    del eps  # the norm inside has its own
    check(
      width % cfg.head_size == 0,
      f"head_size is {cfg.head_size}, expected a divisor of the width {width}.",
    )
    self.cfg = cfg
    self.heads = width // cfg.head_size
    self.key_size = self.value_size = cfg.head_size
    rise, fall = rising(layer), falling(layer)
    # Of r, w, k, v, the rate and the gate.
    shares = [share_before(width, power * fall) for power in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]
    self.shares = param(jnp.stack(shares), None, "embed", decays=False)
    # As large as an orthogonal matrix times 0.1.
    small = 0.1 * width**-0.5
    make = lambda std: Linear((width, width), ("embed", "heads"), std=std, rngs=rngs)
    self.r, self.k, self.v = make(std), make(small), make(std)

    def low_rank(rank, factor, act=None):
      rank = rank or max(32 * round(factor * math.sqrt(width) / 32), 32)
      return LowRank(width, rank, width, std=small, rngs=rngs, act=act, down_std=0.0)

    self.decay = low_rank(cfg.decay_rank, 2.5, jnp.tanh)
    self.rate = low_rank(cfg.rate_rank, 2.5)
    self.gate = low_rank(cfg.gate_rank, 5.0, jax.nn.sigmoid)
    even, bent = spread(width, -0.5, 0.5, 1), _bent(width, cfg.head_size)
    decay = spread(width, -6.0, 0.0, 1 + rise**0.3) + 0.5 + 2.5 * bent
    self.decay_bias = param(decay, "heads")
    self.rate_bias = param(-0.19 + 0.3 * bent + 0.4 * even, "heads")
    self.erased = param(0.71 - 0.1 * even, "heads")
    self.written = param(jnp.full(width, 1.02), "heads")
    self.bonus = param(jnp.full(width, -0.04), "heads")
    scale = ((1 + jnp.asarray(layer.index, jnp.float32)) / layer.depth) ** 0.7
    eps = 1e-5 * cfg.head_size
    self.norm = HeadLayerNorm(self.heads, cfg.head_size, eps=eps, bias=True, scale=scale)
    self.out = Linear((width, width), ("heads", "embed"), std=0.0, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    H, d = self.heads, self.key_size
    shift = jnp.zeros((batch, H * d), dtype)
    return dict(S=jnp.zeros((batch, H, d, d), accum_dtype(dtype)), shift=shift)

  def mix(self, x, segment_ids, state):
    wide = accum_dtype(x.dtype)
    before = None if state is None else state["shift"]
    before, last = token_shift(x, state=before, segment_ids=segment_ids)
    x_r, x_w, x_k, x_v, x_a, x_g = (lerp(x, before, share) for share in self.shares[...])
    channels = lambda w, dtype: w[...].astype(dtype)[None, None]
    gate_activation = lambda y, bias: jax.nn.sigmoid(y.astype(wide) + channels(bias, wide))
    r, k, v = self.r(x_r), self.k(x_k), self.v(x_v)
    w = -math.exp(-0.5) * gate_activation(self.decay(x_w), self.decay_bias)
    eta = gate_activation(self.rate(x_a), self.rate_bias)
    norm = lambda y: l2_norm(y, self.key_size)
    kappa = per_head(norm, k * channels(self.erased, x.dtype), self.key_size)
    # What is erased fast is written in full.
    k = k * (1 + (eta - 1) * channels(self.written, wide)).astype(x.dtype)
    split = lambda y: split_heads(y, self.heads)
    rows = (split(y) for y in (r, k, v, kappa, (kappa * eta.astype(x.dtype)), w))
    o, S = self.run(*rows, segment_ids, state, scale=1.0)
    own = split((r * k * channels(self.bonus, x.dtype)).astype(wide)).sum(axis=-1, keepdims=True)
    o = self.norm(o) + merge_heads(own.astype(x.dtype) * split(v))
    y = self.out(o * self.gate(x_g))
    return y, None if state is None else dict(S=S, shift=last)


def _bent(width, head_size):
  """From -1 in the first channel of a head to 1 in its last, flat in the middle."""
  at = jnp.arange(width, dtype=jnp.float32) % head_size
  at = 2 * at / max(head_size - 1, 1) - 1
  return at * jnp.abs(at)
