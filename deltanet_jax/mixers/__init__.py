"""Token mixers: a new one is a file here and a line in MIXERS."""

import importlib

from deltanet_jax.config import MixerConfig
from deltanet_jax.mixers.base import ONLY_LAYER, Layer, Mixer

# Kind, as settings name it, to the class; "module:Class" is imported when it is asked for.
MIXERS: dict[str, str | type[Mixer]] = {
  "abc": "deltanet_jax.mixers.abc_gsa:ABC",
  "attention": "deltanet_jax.mixers.attention:Attention",
  "block_deltanet": "deltanet_jax.mixers.block_deltanet:BlockDeltaNet",
  "deltanet": "deltanet_jax.mixers.deltanet:DeltaNet",
  "deltaproduct": "deltanet_jax.mixers.deltaproduct:DeltaProduct",
  "dfw": "deltanet_jax.mixers.dfw:DFW",
  "gated_deltanet": "deltanet_jax.mixers.gated_deltanet:GatedDeltaNet",
  "gated_rfa": "deltanet_jax.mixers.gated_rfa:GatedRFA",
  "gla": "deltanet_jax.mixers.gla:GLA",
  "gsa": "deltanet_jax.mixers.abc_gsa:GSA",
  "hgrn2": "deltanet_jax.mixers.hgrn2:HGRN2",
  "hyena": "deltanet_jax.mixers.hyena:Hyena",
  "kda": "deltanet_jax.mixers.kda:KDA",
  "linear_attention": "deltanet_jax.mixers.linear_attention:LinearAttention",
  "mamba": "deltanet_jax.mixers.mamba:Mamba",
  "mamba2": "deltanet_jax.mixers.mamba2:Mamba2",
  "mlstm": "deltanet_jax.mixers.mlstm:MLSTM",
  "multihead_hyena": "deltanet_jax.mixers.hyena:MultiheadHyena",
  "retnet": "deltanet_jax.mixers.retnet:RetNet",
  "rwkv4": "deltanet_jax.mixers.rwkv4:RWKV4",
  "rwkv6": "deltanet_jax.mixers.rwkv6:RWKV6",
  "rwkv7": "deltanet_jax.mixers.rwkv7:RWKV7",
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


def build_mixer(cfg: MixerConfig, width: int, *, layer: Layer = ONLY_LAYER, **options) -> Mixer:
  """The mixer that these settings are of; options are `rngs`, and `eps`, `std` if need be."""
  mixer = mixer_class(cfg.kind)
  own = dict(layer=layer) if mixer.by_layer else {}
  return mixer(cfg, width, **own, **options)


__all__ = ["MIXERS", "Layer", "Mixer", "build_mixer", "mixer_class", "mixer_config"]
