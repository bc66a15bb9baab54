"""RetNet: linear attention with rotary positions and a fixed decay per head."""

import jax.numpy as jnp
import numpy as np

from deltanet_jax.config import RetNetConfig
from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.layers import split_heads
from deltanet_jax.mixers.recurrent import QKV, HeadOutput, chunk_flops, run_linear_attention
from deltanet_jax.ops import rope
from deltanet_jax.ops.documents import positions
from deltanet_jax.ops.dtypes import wide_dtype


class RetNet(Mixer):
  """o_t = dk^-1/2 q_t S_t, S_t = (1 - 2^{-5-h}) S_{t-1} + k_t^T v_t in head h."""

  def __init__(self, cfg: RetNetConfig, width: int, *, eps: float, std: float, rngs):
    self.cfg = cfg
    self.sizes = int(width * cfg.expand_k) // cfg.heads, int(width * cfg.expand_v) // cfg.heads
    dk, dv = self.sizes
    self.qkv = QKV(width, cfg.heads * dk, cfg.heads * dv, 0, std=std, rngs=rngs)
    self.output = HeadOutput(width, cfg.heads, dv, True, eps=eps, std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    S = jnp.zeros((batch, self.cfg.heads, *self.sizes), wide_dtype(dtype))
    return dict(S=S, position=jnp.zeros((batch,), jnp.int32))

  def mix(self, x, segment_ids, state):
    cfg, (B, L) = self.cfg, x.shape[:2]
    (q, k, v), _ = self.qkv(x, segment_ids, None)
    q, k, v = (split_heads(y, cfg.heads) for y in (q, k, v))
    start = jnp.zeros((B,), jnp.int32) if state is None else state["position"]
    position = positions(start, L, segment_ids)
    g = jnp.asarray(np.log1p(-(2.0 ** (-5 - np.arange(cfg.heads)))), wide_dtype(x.dtype))
    q, k = rope(q, position, cfg.rope_base), rope(k, position, cfg.rope_base)
    g = jnp.broadcast_to(g[None, None], (B, L, cfg.heads))
    o, S = run_linear_attention(cfg, q, k, v, g, segment_ids, state)
    return self.output(o, x), None if state is None else dict(S=S, position=position[:, -1] + 1)

  def flops(self, length):
    return chunk_flops(self.cfg.heads, *self.sizes, self.cfg.chunk, length, delta=False)
