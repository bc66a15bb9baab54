"""DFW (decaying fast weights): linear attention with per-channel decays of keys and values."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.layers import QKV, HeadOutput, Linear, param, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import upcast


@settings
class DFWConfig(MixerConfig):
  kind: ClassVar[str] = "dfw"

  heads: int | None = setting(None, "Number of heads; None: width / head_size.")
  head_size: int = setting(64, "Size of queries, keys and values per head.")
  output_gate: bool = setting(True, "Gate the output after the per-head norm.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "heads", "head_size")
    check_chunk(self.chunk)


def _gate(width, heads, size, *, std, rngs):
  """Projection to gate logits; the bias makes initial gates uniform in (0, 1) over channels."""
  gate = Linear((width, heads * size), ("embed", "heads"), std=std, rngs=rngs, bias=True)
  edge = 1 / (size + 1)
  u = jax.random.uniform(rngs.params(), (heads * size,), jnp.float32, edge, 1 - edge)
  gate.bias = param(jnp.log(u) - jnp.log1p(-u), "heads")
  return gate


class DFW(LinearAttentionMixer):
  """o_t = dk^-1/2 q_t S_t, S_t = Diag(sigmoid(a_t)) S_{t-1} Diag(sigmoid(b_t)) + k_t^T v_t."""

  Config = DFWConfig
  recurrence = "S_t = S_{t-1} ⊙ (β_t α_tᵀ) + v_t k_tᵀ"
  readout = "o_t = S_t q_t"
  efficient_form = "chunkwise, two levels"
  kernels = "plain XLA"  # no kernel supports the decay of values

  def __init__(self, cfg: DFWConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    self.cfg = cfg
    self.key_size = self.value_size = d = cfg.head_size
    self.heads = H = cfg.heads or max(width // d, 1)
    self.qkv = QKV(width, H * d, H * d, 0, std=std, rngs=rngs)
    self.alpha = _gate(width, H, d, std=std, rngs=rngs)
    self.beta = _gate(width, H, d, std=std, rngs=rngs)
    self.output = HeadOutput(width, H, d, cfg.output_gate, eps=eps, std=std, rngs=rngs)

  def mix(self, x, segment_ids, state):
    (q, k, v), _ = self.qkv(x, segment_ids, None)
    gates = (jax.nn.log_sigmoid(upcast(gate(x))) for gate in (self.alpha, self.beta))
    q, k, v, g, h = (split_heads(y, self.heads) for y in (q, k, v, *gates))
    o, S = self.run(q, k, v, g, segment_ids, state, h=h)
    return self.output(o, x), None if state is None else dict(S=S)
