"""Gated RFA: normalized random-feature attention with a per-head (scalar) decay."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.config import MixerConfig, check_positive, setting, settings
from deltanet_jax.mixers.layers import QKV, Linear, merge_heads, param, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import upcast


@settings
class GatedRFAConfig(MixerConfig):
  kind: ClassVar[str] = "gated_rfa"

  heads: int | None = setting(None, "Number of heads; None: width / head_size.")
  head_size: int = setting(64, "Size of queries, keys and values per head.")
  features: int = setting(
    64, "Random projections per head; each yields a sine and a cosine feature."
  )
  seed: int = setting(
    0, "Random seed of the projections, which are not trained and equal in all layers."
  )
  smallest: float = setting(0.01, "Lower bound of the normalizer that outputs are divided by.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "heads", "head_size", "features", "smallest")
    check_chunk(self.chunk)


@functools.cache
def directions(seed: int, heads: int, features: int, size: int) -> np.ndarray:
  """Random projections `[H f d]`, standard normal and equal in all versions of NumPy and JAX."""
  return np.random.RandomState(seed).standard_normal((heads, features, size))


class GatedRFA(LinearAttentionMixer):
  """o_t = phi(q_t) S_t / max(phi(q_t) z_t, smallest), S_t = a_t S_{t-1} + (1 - a_t) phi(k_t)^T v_t.

  z_t = a_t z_{t-1} + (1 - a_t) phi(k_t); phi(x) = f^-1/2 [sin(W x), cos(W x)] of x / |x|, random
  features of a Gaussian kernel.
  """

  Config = GatedRFAConfig
  recurrence = "S_t = g_t S_{t-1} + (1-g_t) v_t k_tᵀ, z_t = g_t z_{t-1} + (1-g_t) k_t"
  readout = "o_t = S_t q_t / (z_tᵀ q_t)"
  normalized = True

  def __init__(
    self, cfg: GatedRFAConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs
  ):
    del eps  # no norm in this mixer
    self.cfg = cfg
    self.heads = H = cfg.heads or max(width // cfg.head_size, 1)
    self.key_size, self.value_size = 2 * cfg.features, cfg.head_size
    inner = H * cfg.head_size
    self.qkv = QKV(width, inner, inner, 0, std=std, rngs=rngs, bias=True)
    # Inverse kernel width per channel.
    self.sharpness = param(jnp.ones((H, cfg.head_size)), None, None, decays=False)
    self.decay = Linear((width, H), ("embed", None), std=std, rngs=rngs, bias=True)
    self.decay.bias = param(jnp.full(H, 2.0), None)  # decay 0.88: a memory of about 8 tokens
    self.out = Linear((inner, width), ("heads", "embed"), std=std, rngs=rngs, bias=True)

  def flops(self, length):
    # The matmuls of queries and keys with the random projections, which are not parameters.
    return super().flops(length) + 4 * self.heads * self.cfg.features * self.cfg.head_size

  def features(self, x):
    """Return phi(x) of x `[B L H d]` as [sines, cosines]."""
    y = upcast(x)
    squares = (y * y).sum(axis=-1, keepdims=True)
    # The gradient of sqrt at 0 is infinite; the inner `where` avoids evaluating it.
    norm = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
    cfg = self.cfg
    W = jnp.asarray(directions(cfg.seed, self.heads, cfg.features, cfg.head_size), y.dtype)
    W = W * self.sharpness[...].astype(y.dtype)[:, None]
    angles = jnp.einsum("blhd,hfd->blhf", y / (norm + 1e-3), W)
    phi = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return (phi * cfg.features**-0.5).astype(x.dtype)

  def mix(self, x, segment_ids, state):
    (q, k, v), _ = self.qkv(x, segment_ids, None)
    q, k, v = (split_heads(y, self.heads) for y in (q, k, v))
    gate = upcast(self.decay(x))
    q, k = self.features(q), jax.nn.sigmoid(-gate)[..., None] * upcast(self.features(k))
    g = jax.nn.log_sigmoid(gate)
    o, total, state = self.run_normalized(q, k, v, g, segment_ids, state, scale=1.0)
    o = o / jnp.maximum(total, self.cfg.smallest)
    return self.out(merge_heads(o.astype(x.dtype))), state
