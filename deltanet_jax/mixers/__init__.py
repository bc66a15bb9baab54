"""Token mixers: a new one is a file here, its settings in config.py and a line in MIXERS."""

from deltanet_jax import config
from deltanet_jax.mixers.attention import Attention
from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.deltanet import DeltaNet
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNet
from deltanet_jax.mixers.gla import GLA
from deltanet_jax.mixers.mamba import Mamba
from deltanet_jax.mixers.retnet import RetNet

MIXERS = {
  config.AttentionConfig: Attention,
  config.DeltaNetConfig: DeltaNet,
  config.GLAConfig: GLA,
  config.GatedDeltaNetConfig: GatedDeltaNet,
  config.MambaConfig: Mamba,
  config.RetNetConfig: RetNet,
}


def build_mixer(cfg, width: int, *, eps: float = 1e-6, std: float = 0.02, rngs) -> Mixer:
  """The mixer that the type of `cfg` stands for."""
  if type(cfg) not in MIXERS:
    names = sorted(kind.__name__ for kind in MIXERS)
    raise ValueError(f"cfg is a {type(cfg).__name__}, expected one of {names}.")
  return MIXERS[type(cfg)](cfg, width, eps=eps, std=std, rngs=rngs)


__all__ = [
  "GLA",
  "MIXERS",
  "Attention",
  "DeltaNet",
  "GatedDeltaNet",
  "Mamba",
  "Mixer",
  "RetNet",
  "build_mixer",
]
