"""Causal softmax attention: global or sliding-window, grouped-query, optionally with RoPE."""

from typing import ClassVar

import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check, check_positive, setting, settings
from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.layers import Linear, merge_heads, rope, split_heads
from deltanet_jax.ops import cached_attention, causal_attention, init_cache
from deltanet_jax.ops.segments import segment_positions
from deltanet_jax.sharding import locally


@settings
class AttentionConfig(MixerConfig):
  kind: ClassVar[str] = "attention"

  heads: int | None = setting(None, "Number of heads; None: width / head_size.")
  head_size: int = setting(64, "Size of queries, keys and values per head; even.")
  kv_heads: int | None = setting(
    None, "Number of key and value heads (grouped-query attention); None: as many as heads."
  )
  window: int | None = setting(
    None, "Sliding window in tokens, the current one included; None: global attention."
  )
  rope_base: float | None = setting(
    10000.0, "Base of the rotary position embedding; None: no position embedding."
  )
  bias: bool = setting(False, "Add biases to the q, k, v and output projections.")

  def validate(self):
    check_positive(self, "heads", "head_size", "kv_heads", "window", "rope_base")
    check(self.head_size % 2 == 0, f"head_size is {self.head_size}, expected an even number.")


class Attention(Mixer):
  """o_t = sum_j softmax_j(q_t . k_j / sqrt(d)) v_j."""

  Config = AttentionConfig
  recurrence = "K_t = [K_{t-1}; k_t], V_t = [V_{t-1}; v_t]"
  readout = "o_t = V_tᵀ softmax(K_t q_t)"
  operator = "causal_attention"
  efficient_form = "masked matmuls, a window by blocks"
  kernels = "Pallas on GPU, TPU"
  decode = "cache"
  in_place = ("k", "v")

  def __init__(
    self, cfg: AttentionConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs
  ):
    del eps  # no norm in this mixer
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
      # The cache stores rotated keys: the position of a key is fixed.
      q, k = (rope(y, position, self.cfg.rope_base) for y in (q, k))
    window = self.cfg.window
    if state is None:
      attend = lambda q, k, v, ids: (causal_attention(q, k, v, window=window, segment_ids=ids),)
      heads = ("batch", None, "mixing_heads", None)
      names = (heads, heads, heads, ("batch", None))
      (o,) = locally(attend, (q, k, v, segment_ids), names, (heads,))
    else:
      if window is not None and window > state.k.shape[2]:
        window = None  # no sequence is longer than the window
      o, state = cached_attention(q, k, v, state, window=window, segment_ids=segment_ids)
    return self.out(merge_heads(o)), state

  def flops(self, length):
    keys = min(length, self.cfg.window or length)
    # Mean number of visible keys: it rises to `keys` over the first `keys` tokens, then stays.
    seen = (keys + 1) / 2 * keys / length + keys * (length - keys) / length
    return 4 * self.heads * self.cfg.head_size * seen
