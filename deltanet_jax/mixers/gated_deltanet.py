"""Gated DeltaNet: the delta rule with a decay per head and token."""

import jax
import jax.numpy as jnp

from deltanet_jax.config import GatedDeltaNetConfig
from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.layers import Linear, dt_bias, param, split_heads
from deltanet_jax.mixers.recurrent import QKV, HeadOutput, chunk_flops, per_head, run_delta_rule
from deltanet_jax.ops import l2_norm
from deltanet_jax.ops.dtypes import wide_dtype


class GatedDeltaNet(Mixer):
  """o_t = dk^-1/2 q_t S_t, S_t = e^{g_t} (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t."""

  in_place = ("S",)

  def __init__(self, cfg: GatedDeltaNetConfig, width: int, *, eps: float, std: float, rngs):
    self.cfg = cfg
    self.heads = H = cfg.heads or max(3 * width // (4 * cfg.key_size), 1)
    self.qkv = QKV(width, H * cfg.key_size, H * cfg.value_size, cfg.conv, std=std, rngs=rngs)
    self.beta = Linear((width, H), ("embed", None), std=std, rngs=rngs)
    self.decay = Linear((width, H), ("embed", None), std=std, rngs=rngs)
    # The published range begins at 0, where the logarithm is lost.
    A = jax.random.uniform(rngs.params(), (H,), jnp.float32, 1e-3, 16.0)
    self.A_log = param(jnp.log(A), None)
    self.dt_bias = param(dt_bias(rngs, (H,)), None)
    self.output = HeadOutput(width, H, cfg.value_size, cfg.output_gate, eps=eps, std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    S = jnp.zeros((batch, self.heads, self.cfg.key_size, self.cfg.value_size), wide_dtype(dtype))
    return dict(S=S, **self.qkv.init_state(batch, dtype))

  def mix(self, x, segment_ids, state):
    cfg, wide = self.cfg, wide_dtype(x.dtype)
    (q, k, v), convs = self.qkv(x, segment_ids, state)
    q, k, v = (jax.nn.silu(y) for y in (q, k, v))
    norm = lambda y: l2_norm(y, cfg.key_size)
    q, k = (per_head(norm, y, cfg.key_size) for y in (q, k))
    q, k, v = (split_heads(y, self.heads) for y in (q, k, v))
    beta = jax.nn.sigmoid(self.beta(x).astype(wide))
    dt = jax.nn.softplus(self.decay(x).astype(wide) + self.dt_bias[...].astype(wide)[None, None])
    g = -jnp.exp(self.A_log[...].astype(wide))[None, None] * dt
    o, S = run_delta_rule(cfg, q, k, v, beta, g, segment_ids, state)
    return self.output(o, x), None if state is None else dict(S=S, **convs)

  def flops(self, length):
    cfg = self.cfg
    return chunk_flops(self.heads, cfg.key_size, cfg.value_size, cfg.chunk, length, delta=True)
