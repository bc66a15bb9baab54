"""One pre-norm layer: mixer and MLP, each added to the residual stream."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from deltanet_jax.config import ModelConfig
from deltanet_jax.mixers import Layer, build_mixer
from deltanet_jax.mixers.layers import GeluMLP, LayerNorm, RMSNorm, ShortConv, SwiGLU
from deltanet_jax.models.channel_mix import ChannelMix


def make_norm(cfg: ModelConfig) -> RMSNorm | LayerNorm:
  """Return a norm of the residual stream."""
  norm = RMSNorm if cfg.norm == "rms" else LayerNorm
  return norm(cfg.width, "embed", eps=cfg.norm_eps)


def _make_mlp(cfg: ModelConfig, layer: Layer, rngs) -> SwiGLU | GeluMLP | ChannelMix:
  sizes, options = (cfg.width, cfg.mlp_width), dict(std=cfg.init_std, rngs=rngs)
  if cfg.mlp in ("rwkv4", "rwkv6"):
    return ChannelMix(*sizes, cfg.mlp, layer, **options)
  return (SwiGLU if cfg.mlp == "swiglu" else GeluMLP)(*sizes, **options)


def _scale(module: nnx.Module, factor: float, select: Callable[[tuple, nnx.Module], bool]):
  """Multiply the kernels of those submodules for which `select(path, submodule)`."""
  for path, inner in nnx.iter_modules(module):
    if select(path, inner):
      inner.kernel[...] = factor * inner.kernel[...]


class Block(nnx.Module):
  """x += mixer(norm(x)); x += mlp(norm(x)), the latter only if the model has an MLP.

  With `mlp="identity"` the second branch is norm(x).
  """

  def __init__(self, cfg: ModelConfig, name: str, layer: Layer, *, rngs):
    options = dict(layer=layer, eps=cfg.norm_eps, std=cfg.init_std, rngs=rngs)
    self.mixer_norm = make_norm(cfg)
    self.mixer = build_mixer(cfg.mixers[name], cfg.width, **options)
    self.mlp_norm = make_norm(cfg) if cfg.has_mlp else None
    self.mlp = _make_mlp(cfg, layer, rngs) if cfg.mlp_width else None
    smaller = (2 * cfg.depth) ** -0.5
    if cfg.output_init == "all":
      _scale(self.mixer, smaller, lambda path, _: path[-1:] == ("out",))
    if cfg.output_init != "plain" and self.mlp is not None:
      _scale(self.mlp, smaller, lambda path, _: path[-1:] == ("down",))
    if cfg.conv_std is not None:
      factor = cfg.conv_std / cfg.init_std
      _scale(self.mixer, factor, lambda _, inner: isinstance(inner, ShortConv))

  def init_state(self, batch: int, max_length: int, dtype) -> Any:
    """Return the initial decoding state of mixer and MLP; only RWKV's channel mix has one."""
    has_state = isinstance(self.mlp, ChannelMix)
    return dict(
      mixer=self.mixer.init_state(batch, max_length, dtype),
      mlp=self.mlp.init_state(batch, dtype) if has_state else None,
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
    bound = {} if lower_bound is None else dict(lower_bound=lower_bound)
    y, new["mixer"] = self.mixer.mix(self.mixer_norm(x), segment_ids, before["mixer"], **bound)
    x = x + y
    if isinstance(self.mlp, ChannelMix):
      y, new["mlp"] = self.mlp(self.mlp_norm(x), segment_ids, before["mlp"])
      x = x + y
    elif self.mlp_norm is not None:
      y = self.mlp_norm(x)
      x = x + (y if self.mlp is None else self.mlp(y))
    return x, None if state is None else new
