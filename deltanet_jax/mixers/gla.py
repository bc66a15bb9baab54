"""GLA: linear attention with a decay per key channel."""

import jax
import jax.numpy as jnp

from deltanet_jax.config import GLAConfig
from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.layers import Linear, split_heads
from deltanet_jax.mixers.recurrent import QKV, HeadOutput, chunk_flops, run_linear_attention
from deltanet_jax.ops.dtypes import wide_dtype


class GLA(Mixer):
  """o_t = dk^-1/2 q_t S_t, S_t = Diag(e^{g_t}) S_{t-1} + k_t^T v_t."""

  def __init__(self, cfg: GLAConfig, width: int, *, eps: float, std: float, rngs):
    self.cfg = cfg
    self.sizes = int(width * cfg.expand_k) // cfg.heads, int(width * cfg.expand_v) // cfg.heads
    dk, dv = self.sizes
    self.qkv = QKV(width, cfg.heads * dk, cfg.heads * dv, cfg.conv, std=std, rngs=rngs)
    self.decay_down = Linear((width, cfg.gate_rank), ("embed", None), std=std, rngs=rngs)
    self.decay_up = Linear(
      (cfg.gate_rank, cfg.heads * dk), (None, "heads"), std=std, rngs=rngs, bias=True
    )
    self.output = HeadOutput(width, cfg.heads, dv, True, eps=eps, std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    S = jnp.zeros((batch, self.cfg.heads, *self.sizes), wide_dtype(dtype))
    return dict(S=S, **self.qkv.init_state(batch, dtype))

  def mix(self, x, segment_ids, state):
    cfg = self.cfg
    (q, k, v), convs = self.qkv(x, segment_ids, state)
    if cfg.conv:
      q, k, v = (jax.nn.silu(y) for y in (q, k, v))
    q, k, v = (split_heads(y, cfg.heads) for y in (q, k, v))
    gate = self.decay_up(self.decay_down(x)).astype(wide_dtype(x.dtype))
    g = split_heads(jax.nn.log_sigmoid(gate) / cfg.gate_temperature, cfg.heads)
    o, S = run_linear_attention(cfg, q, k, v, g, segment_ids, state)
    return self.output(o, x), None if state is None else dict(S=S, **convs)

  def flops(self, length):
    return chunk_flops(self.cfg.heads, *self.sizes, self.cfg.chunk, length, delta=False)
