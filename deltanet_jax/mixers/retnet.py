"""RetNet: linear attention with RoPE and a fixed per-head (scalar) decay."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.base import check_conv
from deltanet_jax.mixers.layers import HeadOutput, rope, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.segments import segment_positions


@settings
class RetNetConfig(MixerConfig):
  kind: ClassVar[str] = "retnet"

  heads: int = setting(4, "Number of heads.")
  expand_k: float = setting(1.0, "Total key width of all heads over the model width.")
  expand_v: float = setting(2.0, "Total value width of all heads over the model width.")
  rope_base: float = setting(10000.0, "Base of the rotary position embedding.")
  conv: int = setting(0, "Kernel width of the short convolutions of q, k and v; 0: none.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "heads", "expand_k", "expand_v", "rope_base")
    check_conv(self.conv)
    check_chunk(self.chunk)


class RetNet(LinearAttentionMixer):
  """o_t = dk^-1/2 q_t S_t, S_t = (1 - 2^{-5-h}) S_{t-1} + k_t^T v_t in head h."""

  Config = RetNetConfig
  recurrence = "S_t = γ S_{t-1} + v_t k_tᵀ"
  readout = "o_t = S_t q_t"

  def __init__(self, cfg: RetNetConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    self.cfg = cfg
    self.build_qkv(cfg, width, "silu" if cfg.conv else "identity", std=std, rngs=rngs)
    self.output = HeadOutput(width, self.heads, self.value_size, True, eps=eps, std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    position = jnp.zeros((batch,), jnp.int32)
    return super().init_state(batch, max_length, dtype) | dict(position=position)

  def mix(self, x, segment_ids, state):
    B, L, H = *x.shape[:2], self.heads
    (q, k, v), convs = self.qkv(x, segment_ids, state)
    q, k, v = (split_heads(y, H) for y in (q, k, v))
    start = jnp.zeros((B,), jnp.int32) if state is None else state["position"]
    position = segment_positions(start, L, segment_ids)
    g = jnp.asarray(np.log1p(-(2.0 ** (-5 - np.arange(H)))), accum_dtype(x.dtype))
    q, k = (rope(y, position, self.cfg.rope_base) for y in (q, k))
    g = jnp.broadcast_to(g[None, None], (B, L, H))
    o, S = self.run(q, k, v, g, segment_ids, state)
    new = dict(S=S, position=position[:, -1] + 1, **convs)
    return self.output(o, x), None if state is None else new
