"""Block DeltaNet: one delta rule per block of a large key, the paper's proposal for larger states.

The transition matrix of a head is block-diagonal. Each block runs as a head of the delta rule, with
values and beta shared by the blocks of a head and outputs summed over them. Head sizes are thus not
limited by what one kernel supports, only block sizes are.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check, check_positive, setting, settings
from deltanet_jax.mixers.base import check_conv, check_implementation
from deltanet_jax.mixers.layers import QKV, HeadOutput, Linear, split_heads
from deltanet_jax.mixers.matrix_state import DeltaRuleMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.epilogue import Epilogue


@settings
class BlockDeltaNetConfig(MixerConfig):
  kind: ClassVar[str] = "block_deltanet"

  heads: int | None = setting(None, "Number of heads; None: width / key_size.")
  key_size: int = setting(512, "Key size per head (dk).")
  block_size: int = setting(
    128, "Keys are split into blocks of this size, each with its own delta rule; divides key_size."
  )
  value_size: int = setting(512, "Value size per head (dv).")
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
    check_positive(self, "heads", "key_size", "block_size", "value_size")
    check(
      self.key_size % self.block_size == 0,
      f"block_size is {self.block_size}, expected a divisor of key_size = {self.key_size}.",
    )
    check_conv(self.conv)
    check_chunk(self.chunk)
    check_implementation(self.implementation)


class BlockDeltaNet(DeltaRuleMixer):
  """o_t = dk^-1/2 sum_i q_i S_i over blocks i, each with S_i += beta_t k_i^T (v_t - k_i S_i)."""

  Config = BlockDeltaNetConfig
  recurrence = "S_t = S_{t-1} blockdiag_i(I - β_t k_{t,i} k_{t,i}ᵀ) + β_t v_t k_tᵀ"
  readout = "o_t = S_t q_t"

  def __init__(
    self, cfg: BlockDeltaNetConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs
  ):
    self.cfg = cfg
    self.heads = H = cfg.heads or max(width // cfg.key_size, 1)
    self.blocks = cfg.key_size // cfg.block_size
    self.key_size, self.value_size = dk, dv = cfg.key_size, cfg.value_size
    # Each block is normalized: with a key of total norm 1, a block would correct only 1/m of it.
    epilogue = Epilogue("silu", "l2", cfg.block_size), Epilogue("silu", size=dv)
    self.qkv = QKV(width, H * dk, H * dv, cfg.conv, std=std, rngs=rngs, epilogue=epilogue)
    self.beta = Linear((width, H), ("embed", None), std=std, rngs=rngs)
    self.output = HeadOutput(width, H, dv, cfg.output_gate, eps=eps, std=std, rngs=rngs)

  def init_state(self, batch, max_length, dtype):
    shape = (batch, self.heads * self.blocks, self.cfg.block_size, self.value_size)
    return dict(S=jnp.zeros(shape, accum_dtype(dtype)), **self.qkv.init_state(batch, dtype))

  def flops(self, length):
    """FLOPs of the chunkwise form; every block repeats the matmuls with values."""
    dk, dv, C = self.cfg.block_size, self.value_size, min(self.cfg.chunk or 64, length)
    linear, correction = C * dk + C * dv + 2 * dk * dv, C * dk + C * C / 3 + C * dv + dk * dv
    return 2 * self.heads * self.blocks * (linear + correction)

  def mix(self, x, segment_ids, state):
    H, m = self.heads, self.blocks
    (q, k, v, beta), convs = self.qkv(x, segment_ids, state, extra=(self.beta,))
    q, k = (split_heads(y, H * m) for y in (q, k))
    beta = jax.nn.sigmoid(beta.astype(accum_dtype(x.dtype)))
    v, beta = (jnp.repeat(y, m, axis=2) for y in (split_heads(v, H), beta))
    o, S = self.run(q, k, v, beta, None, segment_ids, state)
    o = o.reshape(*o.shape[:2], H, m, o.shape[3]).sum(axis=3)
    return self.output(o, x), None if state is None else dict(S=S, **convs)
