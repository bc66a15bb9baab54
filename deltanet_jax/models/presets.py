"""Named models: the paper's sizes of DeltaNet, its hybrids and the baselines, and tiny ones."""

import dataclasses

from deltanet_jax.config import (
  AttentionConfig,
  DeltaNetConfig,
  GatedDeltaNetConfig,
  GLAConfig,
  MambaConfig,
  ModelConfig,
  RetNetConfig,
)

# Width and depth. The paper gives no shape for 3B; this one keeps its rules (head 128, MLP 8/3).
_SIZES = {"340m": (1024, 24), "1.3b": (2048, 24), "3b": (2560, 36)}
_WINDOW = 2048
_TINY = dict(vocab=256, width=64, depth=4, mlp_multiple=64)


def _pure(name, mixer, **rest) -> ModelConfig:
  return ModelConfig(mixers={name: mixer}, pattern=(name,), **rest)


def sliding_hybrid(deltanet, attention: AttentionConfig, **rest) -> ModelConfig:
  """A sliding window in every other layer, beginning with the second."""
  mixers = {"deltanet": deltanet, "window": attention}
  return ModelConfig(mixers=mixers, pattern=("deltanet", "window"), **rest)


def global_hybrid(deltanet, attention: AttentionConfig, depth: int, **rest) -> ModelConfig:
  """Global attention in the second layer and in layer depth / 2 + 1, counted from 1."""
  attending = (2, depth // 2 + 1)
  pattern = tuple("global" if i + 1 in attending else "deltanet" for i in range(depth))
  mixers = {"deltanet": deltanet, "global": attention}
  return ModelConfig(mixers=mixers, pattern=pattern, depth=depth, **rest)


def _family(size, shape, deltanet, attention, window) -> dict[str, ModelConfig]:
  without = dataclasses.replace(deltanet, conv=0)
  sliding = dataclasses.replace(attention, window=window)
  return {
    f"deltanet-{size}": _pure("deltanet", deltanet, **shape),
    f"deltanet-noconv-{size}": _pure("deltanet", without, **shape),
    f"deltanet-sliding-{size}": sliding_hybrid(deltanet, sliding, **shape),
    f"deltanet-global-{size}": global_hybrid(deltanet, attention, **shape),
  }


def _baselines(size, shape, attention, gated, retnet, gla, mamba) -> dict[str, ModelConfig]:
  conv = lambda cfg, width: dataclasses.replace(cfg, conv=width)
  # Mamba has no MLP, so twice the layers; its norms have another epsilon.
  blocks = dict(shape, depth=2 * shape["depth"], mlp_ratio=0.0, norm_eps=1e-5)
  gated_shape = dict(shape, depth=min(shape["depth"], 21))
  return {
    f"transformer-{size}": _pure("attention", attention, **shape),
    f"gated-deltanet-{size}": _pure("gated_deltanet", gated, **gated_shape),
    f"retnet-{size}": _pure("retnet", retnet, **dict(shape, mlp_ratio=2.0)),
    f"gla-{size}": _pure("gla", gla, **shape),
    f"gla-conv-{size}": _pure("gla", conv(gla, 4), **shape),
    f"mamba-{size}": _pure("mamba", mamba, **blocks),
    f"mamba-noconv-{size}": _pure("mamba", conv(mamba, 0), **blocks),
  }


def _all() -> dict[str, ModelConfig]:
  presets = {}
  for size, (width, depth) in _SIZES.items():
    shape = dict(width=width, depth=depth)
    presets |= _family(size, shape, DeltaNetConfig(), AttentionConfig(), _WINDOW)
    if size != "3b":
      retnet = RetNetConfig(heads=width // 256)
      rest = (GatedDeltaNetConfig(), retnet, GLAConfig(), MambaConfig())
      presets |= _baselines(size, shape, AttentionConfig(), *rest)
  attention = AttentionConfig(head_size=16)
  presets |= _family(
    "tiny", _TINY, DeltaNetConfig(key_size=32, value_size=32, chunk=16), attention, 16
  )
  presets |= _baselines(
    "tiny",
    _TINY,
    attention,
    GatedDeltaNetConfig(key_size=16, value_size=32, chunk=16),
    RetNetConfig(heads=2, chunk=16),
    GLAConfig(heads=2, chunk=16),
    MambaConfig(chunk=16),
  )
  return presets


PRESETS: tuple[str, ...] = tuple(_all())


def preset(name: str, **changes) -> ModelConfig:
  """A fresh configuration of this name with some fields changed."""
  presets = _all()
  if name not in presets:
    raise ValueError(f"preset is {name!r}, expected one of {list(presets)}.")
  cfg = dataclasses.replace(presets[name], **changes)
  cfg.validate()
  return cfg
