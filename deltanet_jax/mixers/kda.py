"""KDA (Kimi Delta Attention): the delta rule with a per-channel (vector) decay."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.base import check_conv, check_implementation
from deltanet_jax.mixers.layers import (
  QKV,
  HeadOutput,
  Linear,
  LowRank,
  dt_bias,
  param,
  split_heads,
)
from deltanet_jax.mixers.matrix_state import DeltaRuleMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.epilogue import Epilogue


@settings
class KDAConfig(MixerConfig):
  kind: ClassVar[str] = "kda"

  heads: int | None = setting(None, "Number of heads; None: width / key_size.")
  key_size: int = setting(128, "Key size per head (dk).")
  value_size: int = setting(128, "Value size per head (dv).")
  gate_rank: int | None = setting(
    None, "Rank of the low-rank projections to decay and output gate; None: value_size."
  )
  conv: int = setting(4, "Kernel width of the short convolutions of q, k and v; 0: none.")
  negative_eigenvalues: bool = setting(
    False, "beta in (0, 2) instead of (0, 1): transitions may have negative eigenvalues."
  )
  chunk: int | None = setting(
    None, "Chunk size of the chunkwise form in tokens; None: the implementation's default."
  )
  implementation: str | None = setting(
    None, "Implementation of the delta rule; None: the fastest on the platform."
  )

  def validate(self):
    check_positive(self, "heads", "key_size", "value_size", "gate_rank")
    check_conv(self.conv)
    check_chunk(self.chunk)
    check_implementation(self.implementation)


class KDA(DeltaRuleMixer):
  """o_t = dk^-1/2 q_t S_t, S_t = (I - beta_t k_t^T k_t) diag(e^g_t) S_{t-1} + beta_t k_t^T v_t."""

  Config = KDAConfig
  recurrence = "S_t = S_{t-1} (Diag(α_t) (I - β_t k_t k_tᵀ)) + β_t v_t k_tᵀ"
  readout = "o_t = S_t q_t"

  def __init__(self, cfg: KDAConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    self.cfg = cfg
    self.heads = H = cfg.heads or max(width // cfg.key_size, 1)
    self.key_size, self.value_size = dk, dv = cfg.key_size, cfg.value_size
    rank = cfg.gate_rank or dv
    epilogue = Epilogue("silu", "l2", dk), Epilogue("silu", size=dv)
    self.qkv = QKV(width, H * dk, H * dv, cfg.conv, std=std, rngs=rngs, epilogue=epilogue)
    self.beta = Linear((width, H), ("embed", None), std=std, rngs=rngs)
    self.decay = LowRank(width, rank, H * dk, std=std, rngs=rngs)
    A = jax.random.uniform(rngs.params(), (H,), jnp.float32, 1.0, 16.0)
    self.A_log = param(jnp.log(A), None)
    self.dt_bias = param(dt_bias(rngs, (H * dk,)), "heads")
    gate = LowRank(width, rank, H * dv, std=std, rngs=rngs, bias=True)
    self.output = HeadOutput(
      width, H, dv, gate, eps=eps, std=std, rngs=rngs, gate_activation=jax.nn.sigmoid
    )

  def mix(self, x, segment_ids, state):
    accum = accum_dtype(x.dtype)
    extra = (self.beta, self.decay.down)
    (*qkv, beta, decay), convs = self.qkv(x, segment_ids, state, extra=extra)
    q, k, v = (split_heads(y, self.heads) for y in qkv)
    beta, decay = jax.nn.sigmoid(beta.astype(accum)), self.decay.from_down(decay)
    dt = jax.nn.softplus(decay.astype(accum) + self.dt_bias[...].astype(accum)[None, None])
    g = -jnp.exp(self.A_log[...].astype(accum))[None, None, :, None] * split_heads(dt, self.heads)
    o, S = self.run(q, k, v, beta, g, segment_ids, state)
    return self.output(o, x), None if state is None else dict(S=S, **convs)
