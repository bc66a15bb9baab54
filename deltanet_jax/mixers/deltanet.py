"""DeltaNet: the delta rule with normalized keys (paper, sections 3.3 and 3.4)."""

from typing import ClassVar

import jax

from deltanet_jax.config import MixerConfig, check_one_of, check_positive, setting, settings
from deltanet_jax.mixers.base import check_conv, check_implementation
from deltanet_jax.mixers.layers import QKV, HeadOutput, Linear, split_heads
from deltanet_jax.mixers.matrix_state import DeltaRuleMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.epilogue import Activation, Epilogue, Norm


@settings
class DeltaNetConfig(MixerConfig):
  kind: ClassVar[str] = "deltanet"

  heads: int | None = setting(None, "Number of heads; None: width / key_size.")
  key_size: int = setting(128, "Key size per head (dk).")
  value_size: int = setting(128, "Value size per head (dv).")
  activation: Activation = setting(
    "silu", "Activation of q and k: silu, relu, elu (1 + elu) or identity."
  )
  norm: Norm = setting("l2", "Norm of q and k per head: l2 or l1.")
  conv: int = setting(4, "Kernel width of the short convolutions of q, k and v; 0: none.")
  negative_eigenvalues: bool = setting(
    False, "beta in (0, 2) instead of (0, 1): transitions may have negative eigenvalues."
  )
  output_gate: bool = setting(False, "Gate the output after the per-head norm.")
  chunk: int | None = setting(
    None, "Chunk size of the chunkwise form in tokens; None: the implementation's default."
  )
  implementation: str | None = setting(
    None, "Implementation of the delta rule; None: the fastest on the platform."
  )

  def validate(self):
    check_positive(self, "heads", "key_size", "value_size")
    check_one_of("activation", self.activation, Activation)
    check_one_of("norm", self.norm, Norm)
    check_conv(self.conv)
    check_chunk(self.chunk)
    check_implementation(self.implementation)


class DeltaNet(DeltaRuleMixer):
  """o_t = dk^-1/2 q_t S_t, S_t = (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t."""

  Config = DeltaNetConfig
  recurrence = "S_t = S_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ"
  readout = "o_t = S_t q_t"

  def __init__(
    self, cfg: DeltaNetConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs
  ):
    self.cfg = cfg
    self.heads = H = cfg.heads or max(width // cfg.key_size, 1)
    self.key_size, self.value_size = dk, dv = cfg.key_size, cfg.value_size
    epilogue = Epilogue(cfg.activation, cfg.norm, dk), Epilogue("silu", size=dv)
    self.qkv = QKV(width, H * dk, H * dv, cfg.conv, std=std, rngs=rngs, epilogue=epilogue)
    self.beta = Linear((width, H), ("embed", None), std=std, rngs=rngs)
    self.output = HeadOutput(width, H, dv, cfg.output_gate, eps=eps, std=std, rngs=rngs)

  def mix(self, x, segment_ids, state):
    (*qkv, beta), convs = self.qkv(x, segment_ids, state, extra=(self.beta,))
    q, k, v = (split_heads(y, self.heads) for y in qkv)
    beta = jax.nn.sigmoid(beta.astype(accum_dtype(x.dtype)))
    o, S = self.run(q, k, v, beta, None, segment_ids, state)
    return self.output(o, x), None if state is None else dict(S=S, **convs)
