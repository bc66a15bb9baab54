"""RWKV-6 (Finch): per-channel decay, a bonus for the current token, data-dependent token shift."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.base import ONLY_LAYER, Layer, count_heads
from deltanet_jax.mixers.layers import Linear, merge_heads, param, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer
from deltanet_jax.mixers.rwkv import (
  RWKVMixer,
  lerp,
  power_ramp,
  ratio_0_to_1,
  ratio_1_to_almost0,
  small_std,
  time_mix,
  zigzag,
)
from deltanet_jax.ops import token_shift
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype


@settings
class RWKV6Config(MixerConfig):
  kind: ClassVar[str] = "rwkv6"

  head_size: int = setting(64, "Key and value size per head; divides the width.")
  shift_rank: int = setting(32, "Rank of the data-dependent part of each token-shift weight.")
  decay_rank: int = setting(64, "Rank of the data-dependent part of the decay.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "head_size", "shift_rank", "decay_rank")
    check_chunk(self.chunk)


class RWKV6(RWKVMixer, LinearAttentionMixer):
  """S_t = Diag(e^{w_t}) S_{t-1} + k_t^T v_t, o_t = r_t (S_{t-1} + (u * k_t)^T v_t).

  The bonus u multiplies the keys, as in RWKV-6; the paper's table has it (d) on the values.
  """

  Config = RWKV6Config
  recurrence = "S_t = S_{t-1} Diag(α_t) + v_t k_tᵀ"
  readout = "o_t = (S_{t-1} + v_t (d ⊙ k_t)ᵀ) q_t"
  efficient_form = "chunkwise, two levels"

  def __init__(
    self,
    cfg: RWKV6Config,
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
    full, half = time_mix(width, falling), time_mix(width, 0.5 * falling)
    # Token-shift weights of w, k, v, r, g (RWKV's time_maa), and of the input of their low-rank
    # part (time_maa_x).
    shares = [full, full, time_mix(width, falling, 0.3 * rising), half, half]
    self.shares = param(jnp.stack(shares), None, "embed", decays=False)
    self.share = param(full, "embed")
    uniform = lambda shape: 0.01 * jax.random.uniform(rngs.params(), shape, minval=-1.0)
    low_rank = lambda value, *axes: param(value, *axes, decays=False)
    r = cfg.shift_rank
    self.shift_down = low_rank(jnp.zeros((width, 5 * r)), "embed", None)
    self.shift_up = low_rank(uniform((5, r, width)), None, None, "embed")
    self.decay_down = low_rank(jnp.zeros((width, cfg.decay_rank)), "embed", None)
    self.decay_up = low_rank(uniform((cfg.decay_rank, width)), None, "heads")
    self.decay = param(power_ramp(width, -6.0, -1.0, 0.7 + 1.3 * rising), "heads")
    bonus = rising * (1 - power_ramp(width, 0.0, 1.0, 1)) + 0.1 * zigzag(width)
    self.bonus = param(bonus, "heads")
    make = lambda std: Linear((width, width), ("embed", "heads"), std=std, rngs=rngs)
    small = small_std(width)
    self.r, self.k, self.v, self.g = make(std), make(small), make(std), make(small)
    self.norm = self.make_norm(layer, eps=64e-5)
    self.out = Linear((width, width), ("heads", "embed"), std=0.0, rngs=rngs)

  def mix(self, x, segment_ids, state):
    previous = None if state is None else state["shift"]
    previous, last = token_shift(x, state=previous, segment_ids=segment_ids)
    x_w, x_k, x_v, x_r, x_g = self.shifted(x, previous)
    r, k, v = (split_heads(y, self.heads) for y in (self.r(x_r), self.k(x_k), self.v(x_v)))
    w = split_heads(self.log_decay(x_w), self.heads)
    # RWKV-6 reads S_{t-1}, but the operator reads S_t: shift keys, values and decays by one token.
    shifted = (token_shift(merge_heads(y), segment_ids=segment_ids)[0] for y in (k, v, w))
    shifted = (split_heads(y, self.heads) for y in shifted)
    o, S = self.run(r, *shifted, segment_ids, state, scale=1.0)
    u = split_heads(self.bonus[...].astype(w.dtype)[None, None], self.heads)
    own = (r.astype(w.dtype) * u * k.astype(w.dtype)).sum(axis=-1, keepdims=True)
    o = o + own.astype(x.dtype) * v
    y = self.out(self.norm(o) * jax.nn.silu(self.g(x_g)))
    if state is None:
      return y, None
    k_t, v_t, w_t = (z[:, -1].astype(S.dtype) for z in (k, v, w))
    S = jnp.exp(w_t)[..., None] * S + k_t[..., None] * v_t[..., None, :]
    return y, dict(S=S, shift=last)

  def shifted(self, x, previous):
    """Yield x interpolated with the previous token for w, k, v, r and g, by learned weights."""
    mixed = jnp.tanh(lerp(x, previous, self.share) @ self.shift_down[...].astype(x.dtype))
    for share, part, up in zip(
      self.shares[...].astype(x.dtype),
      jnp.split(mixed, 5, axis=-1),
      self.shift_up[...].astype(x.dtype),
    ):
      yield lerp(x, previous, share[None, None] + part @ up)

  def log_decay(self, x):
    """-exp(bias + tanh(x A) B) per channel."""
    accum = accum_dtype(x.dtype)
    down, up = (weight[...].astype(x.dtype) for weight in (self.decay_down, self.decay_up))
    log = (jnp.tanh(x @ down) @ up).astype(accum) + self.decay[...].astype(accum)[None, None]
    # Clipped against overflow: e^{-e^10} is already 0.
    return -jnp.exp(jnp.minimum(log, 10.0))
