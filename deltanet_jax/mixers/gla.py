"""GLA (gated linear attention): linear attention with a per-channel (vector) decay."""

from typing import ClassVar

import jax

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.base import check_conv
from deltanet_jax.mixers.layers import HeadOutput, Linear, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype


@settings
class GLAConfig(MixerConfig):
  kind: ClassVar[str] = "gla"

  heads: int = setting(4, "Number of heads.")
  expand_k: float = setting(0.5, "Total key width of all heads over the model width.")
  expand_v: float = setting(1.0, "Total value width of all heads over the model width.")
  gate_rank: int = setting(16, "Rank of the low-rank projection to the decay logits.")
  gate_temperature: float = setting(
    16.0, "Temperature of the decay: log decay = log_sigmoid(logit) / temperature."
  )
  conv: int = setting(0, "Kernel width of the short convolutions of q, k and v; 0: none.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "heads", "expand_k", "expand_v", "gate_rank", "gate_temperature")
    check_conv(self.conv)
    check_chunk(self.chunk)


class GLA(LinearAttentionMixer):
  """o_t = dk^-1/2 q_t S_t, S_t = Diag(e^{g_t}) S_{t-1} + k_t^T v_t."""

  Config = GLAConfig
  recurrence = "S_t = S_{t-1} Diag(α_t) + v_t k_tᵀ"
  readout = "o_t = S_t q_t"
  efficient_form = "chunkwise, two levels"

  def __init__(self, cfg: GLAConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    self.cfg = cfg
    self.build_qkv(cfg, width, "silu" if cfg.conv else "identity", std=std, rngs=rngs)
    H, dk, dv = self.heads, self.key_size, self.value_size
    self.decay_down = Linear((width, cfg.gate_rank), ("embed", None), std=std, rngs=rngs)
    self.decay_up = Linear((cfg.gate_rank, H * dk), (None, "heads"), std=std, rngs=rngs, bias=True)
    self.output = HeadOutput(width, H, dv, True, eps=eps, std=std, rngs=rngs)

  def mix(self, x, segment_ids, state):
    (*qkv, gate), convs = self.qkv(x, segment_ids, state, extra=(self.decay_down,))
    q, k, v = (split_heads(y, self.heads) for y in qkv)
    gate = self.decay_up(gate).astype(accum_dtype(x.dtype))
    g = split_heads(jax.nn.log_sigmoid(gate) / self.cfg.gate_temperature, self.heads)
    o, S = self.run(q, k, v, g, segment_ids, state)
    return self.output(o, x), None if state is None else dict(S=S, **convs)
