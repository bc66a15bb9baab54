"""One pre-norm layer: mixer and MLP, each added to the residual stream."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from deltanet_jax.config import ModelConfig
from deltanet_jax.mixers import build_mixer
from deltanet_jax.mixers.parts import RMSNorm, SwiGLU


class Block(nnx.Module):
  """x += mixer(norm(x)); x += mlp(norm(x)), the second only if the model has an MLP."""

  def __init__(self, cfg: ModelConfig, name: str, *, rngs):
    std, eps = cfg.init_std, cfg.norm_eps
    self.mixer_norm = RMSNorm(cfg.width, "embed", eps=eps)
    self.mixer = build_mixer(cfg.mixers[name], cfg.width, eps=eps, std=std, rngs=rngs)
    inner = cfg.mlp_width
    self.mlp_norm = RMSNorm(cfg.width, "embed", eps=eps) if inner else None
    self.mlp = SwiGLU(cfg.width, inner, std=std, rngs=rngs) if inner else None

  def __call__(
    self,
    x: Float[Array, "B L D"],
    segment_ids: Int[Array, "B L"] | None = None,
    state: Any = None,
  ) -> tuple[Float[Array, "B L D"], Any]:
    y, state = self.mixer.mix(self.mixer_norm(x), segment_ids, state)
    x = x + y
    if self.mlp is not None:
      x = x + self.mlp(self.mlp_norm(x))
    return x, state
