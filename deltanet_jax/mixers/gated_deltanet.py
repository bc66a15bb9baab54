"""Gated DeltaNet: the delta rule with a per-head (scalar) decay."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.base import check_conv, check_implementation
from deltanet_jax.mixers.layers import (
  QKV,
  HeadOutput,
  Linear,
  dt_bias,
  param,
  split_heads,
)
from deltanet_jax.mixers.matrix_state import DeltaRuleMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.epilogue import Epilogue


@settings
class GatedDeltaNetConfig(MixerConfig):
  kind: ClassVar[str] = "gated_deltanet"

  heads: int | None = setting(None, "Number of heads; None: keys fill three quarters of the width.")
  key_size: int = setting(256, "Key size per head (dk).")
  value_size: int = setting(512, "Value size per head (dv).")
  conv: int = setting(4, "Kernel width of the short convolutions of q, k and v; 0: none.")
  negative_eigenvalues: bool = setting(
    False, "beta in (0, 2) instead of (0, 1): transitions may have negative eigenvalues."
  )
  output_gate: bool = setting(True, "Gate the output after the per-head norm.")
  chunk: int | None = setting(
    None, "Chunk size of the chunkwise form in tokens; None: the implementation's default."
  )
  implementation: str | None = setting(
    None, "Implementation of the delta rule; None: the fastest on the platform."
  )

  def validate(self):
    check_positive(self, "heads", "key_size", "value_size")
    check_conv(self.conv)
    check_chunk(self.chunk)
    check_implementation(self.implementation)


class GatedDeltaNet(DeltaRuleMixer):
  """o_t = dk^-1/2 q_t S_t, S_t = e^{g_t} (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t."""

  Config = GatedDeltaNetConfig
  recurrence = "S_t = S_{t-1} (α_t (I - β_t k_t k_tᵀ)) + β_t v_t k_tᵀ"
  readout = "o_t = S_t q_t"

  def __init__(
    self,
    cfg: GatedDeltaNetConfig,
    width: int,
    *,
    eps: float = 1e-6,
    std: float = 0.02,
    steps: int = 1,
    rngs,
  ):
    """Args: steps: keys, values and betas per token (DeltaProduct)."""
    self.cfg = cfg
    self.heads = H = cfg.heads or max(3 * width // (4 * cfg.key_size), 1)
    self.key_size, self.value_size = dk, dv = cfg.key_size, cfg.value_size
    epilogue = Epilogue("silu", "l2", dk), Epilogue("silu", size=dv)
    options = dict(steps=steps, epilogue=epilogue)
    self.qkv = QKV(width, H * dk, H * dv, cfg.conv, std=std, rngs=rngs, **options)
    self.beta = Linear((width, steps * H), ("embed", None), std=std, rngs=rngs)
    self.decay = Linear((width, H), ("embed", None), std=std, rngs=rngs)
    # The published range starts at 0, whose logarithm is -inf.
    A = jax.random.uniform(rngs.params(), (H,), jnp.float32, 1e-3, 16.0)
    self.A_log = param(jnp.log(A), None)
    self.dt_bias = param(dt_bias(rngs, (H,)), None)
    self.output = HeadOutput(width, H, dv, cfg.output_gate, eps=eps, std=std, rngs=rngs)

  def projections(self, x, segment_ids, state):
    """Return ((q, k, v), beta, g, convolution states), with heads not yet split.

    g, the log decay, is None without a forget gate.
    """
    accum = accum_dtype(x.dtype)
    extra = [self.beta] if self.decay is None else [self.beta, self.decay]
    (q, k, v, beta, *decay), convs = self.qkv(x, segment_ids, state, extra=extra)
    qkv, beta = (q, k, v), jax.nn.sigmoid(beta.astype(accum))
    if self.decay is None:
      return qkv, beta, None, convs
    dt = jax.nn.softplus(decay[0].astype(accum) + self.dt_bias[...].astype(accum)[None, None])
    g = -jnp.exp(self.A_log[...].astype(accum))[None, None] * dt
    return qkv, beta, g, convs

  def mix(self, x, segment_ids, state):
    qkv, beta, g, convs = self.projections(x, segment_ids, state)
    q, k, v = (split_heads(y, self.heads) for y in qkv)
    o, S = self.run(q, k, v, beta, g, segment_ids, state)
    return self.output(o, x), None if state is None else dict(S=S, **convs)
