"""HGRN-2: linear attention with a per-channel (vector) decay a_t and keys 1 - a_t."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.base import check_conv, count_heads
from deltanet_jax.mixers.layers import QKV, Linear, RMSNorm, merge_heads, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import accum_dtype


@settings
class HGRN2Config(MixerConfig):
  kind: ClassVar[str] = "hgrn2"

  key_size: int = setting(128, "Key and value size per head; divides the width.")
  norm_eps: float = setting(1e-5, "Epsilon of the output norm, which is over all heads together.")
  conv: int = setting(0, "Kernel width of the short convolutions of q, k and v; 0: none.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "key_size", "norm_eps")
    check_conv(self.conv)
    check_chunk(self.chunk)


class HGRN2(LinearAttentionMixer):
  """o_t = dk^-1/2 q_t S_t, S_t = Diag(a_t) S_{t-1} + (1 - a_t)^T v_t.

  a_t = gamma + (1 - gamma) sigmoid(f_t). The model learns the lower bounds gamma `[D]` of all
  layers (`models/hgrn2_lower_bounds.py`); without one it is 0, as in the first layer.
  """

  Config = HGRN2Config
  recurrence = "S_t = S_{t-1} Diag(α_t) + v_t (1 - α_t)ᵀ"
  readout = "o_t = S_t q_t"
  efficient_form = "chunkwise, two levels"
  bounded = True

  def __init__(self, cfg: HGRN2Config, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs):
    del eps  # the output norm has its own
    self.cfg = cfg
    self.heads = count_heads(width, key_size=cfg.key_size)
    self.key_size = self.value_size = cfg.key_size
    # The projection to keys yields the logits f of the decay.
    self.qkv = QKV(width, width, width, cfg.conv, std=std, rngs=rngs)
    self.norm = RMSNorm(width, "heads", eps=cfg.norm_eps)
    self.out = Linear((width, width), ("heads", "embed"), std=std, rngs=rngs)

  def mix(self, x, segment_ids, state, lower_bound=None):
    (q, f, v), convs = self.qkv(x, segment_ids, state)
    g, k = _forget(f.astype(accum_dtype(x.dtype)), lower_bound)
    q, k, v = jax.nn.silu(q), k.astype(x.dtype), v
    q, k, v, g = (split_heads(y, self.heads) for y in (q, k, v, g))
    o, S = self.run(q, k, v, g, segment_ids, state)
    y = self.out(self.norm(merge_heads(o)))
    return y, None if state is None else dict(S=S, **convs)


def _forget(f, gamma):
  """Return (log a, 1 - a) for a = gamma + (1 - gamma) sigmoid(f), without cancellation."""
  kept, forgotten = jax.nn.log_sigmoid(f), jax.nn.sigmoid(-f)
  if gamma is None:
    return kept, forgotten
  gamma = gamma.astype(f.dtype)[None, None]
  # Clamped to 1e-30: the logarithm of 0 has no gradient.
  log_gamma = jnp.log(jnp.maximum(gamma, 1e-30))
  return jnp.logaddexp(log_gamma, jnp.log1p(-gamma) + kept), (1 - gamma) * forgotten
