"""Token mixers: a new one is a file here and a line in MIXERS."""

import importlib

from deltanet_jax.config import MixerConfig
from deltanet_jax.mixers.base import Mixer

# Kind, as settings name it, to the class; "module:Class" is imported when it is asked for.
MIXERS: dict[str, str | type[Mixer]] = {
  "attention": "deltanet_jax.mixers.attention:Attention",
  "deltanet": "deltanet_jax.mixers.deltanet:DeltaNet",
  "gated_deltanet": "deltanet_jax.mixers.gated_deltanet:GatedDeltaNet",
  "gla": "deltanet_jax.mixers.gla:GLA",
  "hyena": "deltanet_jax.mixers.hyena:Hyena",
  "mamba": "deltanet_jax.mixers.mamba:Mamba",
  "multihead_hyena": "deltanet_jax.mixers.hyena:MultiheadHyena",
  "retnet": "deltanet_jax.mixers.retnet:RetNet",
  "s4d": "deltanet_jax.mixers.s4d:S4D",
}


def mixer_class(kind: str) -> type[Mixer]:
  """The mixer of this kind."""
  if kind not in MIXERS:
    raise ValueError(f"the kind of a mixer is {kind!r}, expected one of {sorted(MIXERS)}.")
  found = MIXERS[kind]
  if isinstance(found, str):
    module, name = found.split(":")
    found = getattr(importlib.import_module(module), name)
  return found


def mixer_config(kind: str) -> type[MixerConfig]:
  """The class of its settings."""
  return mixer_class(kind).Config


def build_mixer(cfg: MixerConfig, width: int, **options) -> Mixer:
  """The mixer that these settings are of; options are `rngs`, and `eps`, `std` if need be."""
  return mixer_class(cfg.kind)(cfg, width, **options)


__all__ = ["MIXERS", "Mixer", "build_mixer", "mixer_class", "mixer_config"]
