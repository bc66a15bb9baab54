"""Softmax attention, with rotary positions or none: over all earlier tokens or a sliding window."""

from typing import ClassVar

import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check, check_positive, settings
from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.layers import Linear, merge_heads, rope, split_heads
from deltanet_jax.ops import cached_attention, causal_attention, init_cache
from deltanet_jax.ops.segments import segment_positions
from deltanet_jax.sharding import locally


@settings
class AttentionConfig(MixerConfig):
  kind: ClassVar[str] = "attention"

  heads: int | None = None  # None: as many as fill the width
  head_size: int = 64
  kv_heads: int | None = None  # None: as many as heads
  window: int | None = None  # keys a token sees, its own included; None: all before it
  rope_base: float | None = 10000.0  # None: no positions
  bias: bool = False  # of all four maps

  def validate(self):
    check_positive(self, "heads", "head_size", "kv_heads", "window", "rope_base")
    check(self.head_size % 2 == 0, f"head_size is {self.head_size}, expected an even one.")


class Attention(Mixer):
  """o_t = sum_j softmax_j(q_t . k_j / sqrt(d)) v_j."""

  Config = AttentionConfig
  recurrence = "K_t = [K_{t-1}; k_t], V_t = [V_{t-1}; v_t]"
  readout = "o_t = V_tᵀ softmax(K_t q_t)"
  operator = "causal_attention"
  efficient_form = "masked products, a window by blocks"
  kernels = "Pallas on GPU, TPU"
  decode = "cache"
  in_place = ("k", "v")

  def __init__(
    self, cfg: AttentionConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs
  ):
    del eps  # there is no norm inside
    self.cfg = cfg
    self.heads = cfg.heads or max(width // cfg.head_size, 1)
    self.kv_heads = cfg.kv_heads or self.heads
    if self.heads % self.kv_heads:
      raise ValueError(f"kv_heads is {self.kv_heads}, expected a divisor of heads {self.heads}.")
    inner, kv = self.heads * cfg.head_size, self.kv_heads * cfg.head_size
    options = dict(std=std, rngs=rngs, bias=cfg.bias)
    self.q = Linear((width, inner), ("embed", "heads"), **options)
    self.k = Linear((width, kv), ("embed", "heads"), **options)
    self.v = Linear((width, kv), ("embed", "heads"), **options)
    self.out = Linear((inner, width), ("heads", "embed"), **options)

  def init_state(self, batch, max_length, dtype):
    window = self.cfg.window
    size = max_length if window is None else min(window, max_length)
    return init_cache(batch, size, self.kv_heads, self.cfg.head_size, dtype)

  def recurrent_state(self):
    return None

  def mix(self, x, segment_ids, state):
    B, L = x.shape[:2]
    q, k, v = (
      split_heads(y, heads)
      for y, heads in (
        (self.q(x), self.heads),
        (self.k(x), self.kv_heads),
        (self.v(x), self.kv_heads),
      )
    )
    if self.cfg.rope_base is not None:
      start = jnp.zeros((B,), jnp.int32) if state is None else state.position
      position = segment_positions(start, L, segment_ids)
      # Keys are stored rotated: their own position does not change any more.
      q, k = (rope(y, position, self.cfg.rope_base) for y in (q, k))
    window = self.cfg.window
    if state is None:
      attend = lambda q, k, v, ids: (causal_attention(q, k, v, window=window, segment_ids=ids),)
      heads = ("batch", None, "mixing_heads", None)
      names = (heads, heads, heads, ("batch", None))
      (o,) = locally(attend, (q, k, v, segment_ids), names, (heads,))
    else:
      if window is not None and window > state.k.shape[2]:
        window = None  # rows are shorter than the window
      o, state = cached_attention(q, k, v, state, window=window, segment_ids=segment_ids)
    return self.out(merge_heads(o)), state

  def flops(self, length):
    keys = min(length, self.cfg.window or length)
    # Half of a causal square; a window is full but for its beginning.
    seen = (keys + 1) / 2 * keys / length + keys * (length - keys) / length
    return 4 * self.heads * self.cfg.head_size * seen
