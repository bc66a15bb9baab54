"""Token mixers: registry from a mixer's kind to its class, and construction from a config."""

from deltanet_jax.config import MixerConfig
from deltanet_jax.mixers.abc_gsa import ABC, GSA
from deltanet_jax.mixers.attention import Attention
from deltanet_jax.mixers.base import ONLY_LAYER, Layer, Mixer
from deltanet_jax.mixers.block_deltanet import BlockDeltaNet
from deltanet_jax.mixers.deltanet import DeltaNet
from deltanet_jax.mixers.deltaproduct import DeltaProduct
from deltanet_jax.mixers.dfw import DFW
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNet
from deltanet_jax.mixers.gated_rfa import GatedRFA
from deltanet_jax.mixers.gla import GLA
from deltanet_jax.mixers.hgrn2 import HGRN2
from deltanet_jax.mixers.hyena import Hyena, MultiheadHyena
from deltanet_jax.mixers.kda import KDA
from deltanet_jax.mixers.linear_attention import LinearAttention
from deltanet_jax.mixers.mamba import Mamba
from deltanet_jax.mixers.mamba2 import Mamba2
from deltanet_jax.mixers.mlstm import MLSTM
from deltanet_jax.mixers.retnet import RetNet
from deltanet_jax.mixers.rwkv4 import RWKV4
from deltanet_jax.mixers.rwkv6 import RWKV6
from deltanet_jax.mixers.rwkv7 import RWKV7
from deltanet_jax.mixers.s4d import S4D

# All mixers by `kind`. Other packages register theirs by `MIXERS["name"] = TheirMixer`. Importing
# all modules takes 40 ms more than importing one, which already loads JAX, Flax and the operators.
MIXERS: dict[str, type[Mixer]] = {
  "abc": ABC,
  "attention": Attention,
  "block_deltanet": BlockDeltaNet,
  "deltanet": DeltaNet,
  "deltaproduct": DeltaProduct,
  "dfw": DFW,
  "gated_deltanet": GatedDeltaNet,
  "gated_rfa": GatedRFA,
  "gla": GLA,
  "gsa": GSA,
  "hgrn2": HGRN2,
  "hyena": Hyena,
  "kda": KDA,
  "linear_attention": LinearAttention,
  "mamba": Mamba,
  "mamba2": Mamba2,
  "mlstm": MLSTM,
  "multihead_hyena": MultiheadHyena,
  "retnet": RetNet,
  "rwkv4": RWKV4,
  "rwkv6": RWKV6,
  "rwkv7": RWKV7,
  "s4d": S4D,
}


def mixer_class(kind: str) -> type[Mixer]:
  """Mixer class registered under `kind`."""
  if kind not in MIXERS:
    raise ValueError(f"mixer kind is {kind!r}, expected one of {sorted(MIXERS)}.")
  return MIXERS[kind]


def mixer_config(kind: str) -> type[MixerConfig]:
  """Config class of the mixer registered under `kind`."""
  return mixer_class(kind).Config


def build_mixer(cfg: MixerConfig, width: int, *, layer: Layer = ONLY_LAYER, **options) -> Mixer:
  """Build the mixer that `cfg` describes.

  Args:
    cfg: hyperparameters; their `kind` selects the class.
    width: D, the size of the residual stream.
    layer: index in the model, for mixers whose initialization depends on it.
    options: `rngs`, and optionally `eps` of the norms and `std` of the initial weights.
  """
  mixer = mixer_class(cfg.kind)
  layer_option = dict(layer=layer) if mixer.by_layer else {}
  return mixer(cfg, width, **layer_option, **options)


__all__ = ["MIXERS", "Layer", "Mixer", "build_mixer", "mixer_class", "mixer_config"]
