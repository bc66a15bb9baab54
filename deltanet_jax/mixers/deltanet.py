"""DeltaNet: the delta rule with normalised keys (paper, sections 3.3 and 3.4)."""

import jax
import jax.numpy as jnp

from deltanet_jax.config import DeltaNetConfig
from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.layers import Linear, split_heads
from deltanet_jax.mixers.recurrent import QKV, HeadOutput, chunk_flops, per_head, run_delta_rule
from deltanet_jax.ops import l1_norm, l2_norm
from deltanet_jax.ops.dtypes import wide_dtype

_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "relu": jax.nn.relu,
  "elu": lambda x: 1 + jax.nn.elu(x),
  "identity": lambda x: x,
}
_NORMS = {"l2": l2_norm, "l1": l1_norm}


class DeltaNet(Mixer):
  """o_t = dk^-1/2 q_t S_t, S_t = (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t."""

  in_place = ("S",)

  def __init__(self, cfg: DeltaNetConfig, width: int, *, eps: float, std: float, rngs):
    self.cfg = cfg
    self.heads = H = cfg.heads or max(width // cfg.key_size, 1)
    self.qkv = QKV(width, H * cfg.key_size, H * cfg.value_size, cfg.conv, std=std, rngs=rngs)
    self.beta = Linear((width, H), ("embed", None), std=std, rngs=rngs)
    self.output = HeadOutput(width, H, cfg.value_size, cfg.output_gate, eps=eps, std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    S = jnp.zeros((batch, self.heads, self.cfg.key_size, self.cfg.value_size), wide_dtype(dtype))
    return dict(S=S, **self.qkv.init_state(batch, dtype))

  def mix(self, x, segment_ids, state):
    cfg = self.cfg
    (q, k, v), convs = self.qkv(x, segment_ids, state)
    norm = lambda y: _NORMS[cfg.norm](y, cfg.key_size)
    q, k = (per_head(norm, _ACTIVATIONS[cfg.activation](y), cfg.key_size) for y in (q, k))
    q, k, v = (split_heads(y, self.heads) for y in (q, k, jax.nn.silu(v)))
    beta = jax.nn.sigmoid(self.beta(x).astype(wide_dtype(x.dtype)))
    o, S = run_delta_rule(cfg, q, k, v, beta, None, segment_ids, state)
    return self.output(o, x), None if state is None else dict(S=S, **convs)

  def flops(self, length):
    cfg = self.cfg
    return chunk_flops(self.heads, cfg.key_size, cfg.value_size, cfg.chunk, length, delta=True)
