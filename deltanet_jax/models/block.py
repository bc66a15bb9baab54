"""One pre-norm layer: mixer and MLP, each added to the residual stream."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from deltanet_jax.config import ModelConfig
from deltanet_jax.mixers import Layer, build_mixer
from deltanet_jax.mixers.norms import LayerNorm
from deltanet_jax.mixers.parts import RMSNorm, SwiGLU
from deltanet_jax.models.channel_mix import ChannelMix


def make_norm(cfg: ModelConfig) -> RMSNorm | LayerNorm:
  """A norm of the residual stream."""
  norm = RMSNorm if cfg.norm == "rms" else LayerNorm
  return norm(cfg.width, "embed", eps=cfg.norm_eps)


def _make_mlp(cfg: ModelConfig, layer: Layer, rngs) -> SwiGLU | ChannelMix:
  sizes, options = (cfg.width, cfg.mlp_width), dict(std=cfg.init_std, rngs=rngs)
  if cfg.mlp == "swiglu":
    return SwiGLU(*sizes, **options)
  return ChannelMix(*sizes, cfg.mlp, layer, **options)


class Block(nnx.Module):
  """x += mixer(norm(x)); x += mlp(norm(x)), the second only if the model has an MLP."""

  def __init__(self, cfg: ModelConfig, name: str, layer: Layer, *, rngs):
    options = dict(layer=layer, eps=cfg.norm_eps, std=cfg.init_std, rngs=rngs)
    self.mixer_norm = make_norm(cfg)
    self.mixer = build_mixer(cfg.mixers[name], cfg.width, **options)
    self.mlp_norm = make_norm(cfg) if cfg.mlp_width else None
    self.mlp = _make_mlp(cfg, layer, rngs) if cfg.mlp_width else None

  def init_state(self, batch: int, max_length: int, dtype) -> Any:
    """What mixer and MLP remember; None for an MLP that looks at single tokens."""
    shifts = isinstance(self.mlp, ChannelMix)
    return dict(
      mixer=self.mixer.init_state(batch, max_length, dtype),
      mlp=self.mlp.init_state(batch, dtype) if shifts else None,
    )

  def __call__(
    self,
    x: Float[Array, "B L D"],
    segment_ids: Int[Array, "B L"] | None = None,
    state: Any = None,
    lower_bound: Float[Array, " D"] | None = None,
  ) -> tuple[Float[Array, "B L D"], Any]:
    new = dict(mixer=None, mlp=None)
    before = new if state is None else state
    own = {} if lower_bound is None else dict(lower_bound=lower_bound)
    y, new["mixer"] = self.mixer.mix(self.mixer_norm(x), segment_ids, before["mixer"], **own)
    x = x + y
    if isinstance(self.mlp, ChannelMix):
      y, new["mlp"] = self.mlp(self.mlp_norm(x), segment_ids, before["mlp"])
      x = x + y
    elif self.mlp is not None:
      x = x + self.mlp(self.mlp_norm(x))
    return x, None if state is None else new
