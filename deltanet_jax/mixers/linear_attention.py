"""Linear attention without decay, with optional feature maps of q and k and a normalizer."""

from typing import ClassVar

from deltanet_jax.config import MixerConfig, check, check_one_of, check_positive, setting, settings
from deltanet_jax.mixers.base import check_conv
from deltanet_jax.mixers.feature_maps import (
  SIGNED_FEATURES,
  SIGNED_PRODUCTS,
  FeatureMap,
  FeatureName,
)
from deltanet_jax.mixers.layers import HeadOutput, Linear, merge_heads, split_heads
from deltanet_jax.mixers.matrix_state import LinearAttentionMixer
from deltanet_jax.ops.checks import check_chunk
from deltanet_jax.ops.dtypes import upcast


@settings
class LinearAttentionConfig(MixerConfig):
  kind: ClassVar[str] = "linear_attention"

  heads: int = setting(4, "Number of heads.")
  expand_k: float = setting(1.0, "Total key width of all heads over the model width.")
  expand_v: float = setting(1.0, "Total value width of all heads over the model width.")
  feature_map: FeatureName = setting(
    "identity",
    "Feature map of q and k: identity, elu, relu, t2r, hadamard, hedgehog, dpfp or taylor.",
  )
  dpfp_nu: int = setting(1, "Number of rolled copies in the feature map dpfp.")
  sum_norm: bool = setting(False, "Divide the features of each q and k by their sum.")
  # Not both: a per-head norm would undo the division.
  normalize: bool = setting(
    False, "Divide outputs by phi(q_t) z_t, z the sum of phi(k), instead of a per-head norm."
  )
  conv: int = setting(0, "Kernel width of the short convolutions of q, k and v; 0: none.")
  chunk: int = setting(64, "Chunk size of the chunkwise form in tokens.")

  def validate(self):
    check_positive(self, "heads", "expand_k", "expand_v", "dpfp_nu")
    check_one_of("feature_map", self.feature_map, FeatureName)
    for name, signed in (("sum_norm", SIGNED_FEATURES), ("normalize", SIGNED_PRODUCTS)):
      check(
        not getattr(self, name) or self.feature_map not in signed,
        f"{name} divides by a sum that may vanish with the feature map {self.feature_map!r},"
        " expected a map without negative features, for instance 'elu'.",
      )
    check_conv(self.conv)
    check_chunk(self.chunk)


class LinearAttention(LinearAttentionMixer):
  """o_t = f^-1/2 phi(q_t) S_t, S_t = S_{t-1} + phi(k_t)^T v_t for f features of a key.

  If normalized, o_t is divided by f^-1/2 phi(q_t) z_t, z_t = z_{t-1} + phi(k_t).
  """

  Config = LinearAttentionConfig
  recurrence = "S_t = S_{t-1} + v_t φ(k_t)ᵀ; normalized also z_t = z_{t-1} + φ(k_t)"
  readout = "o_t = S_t φ(q_t); normalized o_t = S_t φ(q_t) / (z_tᵀ φ(q_t))"

  def __init__(
    self, cfg: LinearAttentionConfig, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs
  ):
    self.cfg, self.normalized = cfg, cfg.normalize
    self.build_qkv(cfg, width, "silu" if cfg.conv else "identity", std=std, rngs=rngs)
    H, dk, dv = self.heads, self.key_size, self.value_size
    make = lambda: FeatureMap(cfg.feature_map, dk, nu=cfg.dpfp_nu, std=std, rngs=rngs)
    self.q_map, self.k_map = make(), make()
    self.key_size = self.k_map.size
    if self.normalized:
      self.out = Linear((H * dv, width), ("heads", "embed"), std=std, rngs=rngs)
    else:
      self.output = HeadOutput(width, H, dv, False, eps=eps, std=std, rngs=rngs)

  def flops(self, length):
    # Counting weights once covers one head; feature maps are applied to every head.
    maps = self.q_map.flops() + self.k_map.flops()
    return super().flops(length) + (self.heads - 1) * maps

  def mix(self, x, segment_ids, state):
    (q, k, v), convs = self.qkv(x, segment_ids, state)
    q, k, v = (split_heads(y, self.heads) for y in (q, k, v))
    q, k = self.q_map(q), self.k_map(k)
    if self.cfg.sum_norm:
      q, k = (y / (y.sum(axis=-1, keepdims=True) + 1e-4) for y in map(upcast, (q, k)))
    if self.normalized:
      o, total, state = self.run_normalized(q, k, v, None, segment_ids, state)
      y = self.out(merge_heads((o / (total + 1e-10)).astype(x.dtype)))
      return y, None if state is None else state | convs
    o, S = self.run(q, k, v, None, segment_ids, state)
    return self.output(o, x), None if state is None else dict(S=S, **convs)
