"""Model presets: DeltaNet, its hybrids and the baselines at the paper's sizes, and tiny ones.

A preset is named "family-size". A family is one entry of _FAMILIES, a function from a size to a
model configuration.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from deltanet_jax.config import MixerConfig, ModelConfig, nearest
from deltanet_jax.mixers.abc_gsa import ABCConfig, GSAConfig
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.block_deltanet import BlockDeltaNetConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.deltaproduct import DeltaProductConfig
from deltanet_jax.mixers.dfw import DFWConfig
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNetConfig
from deltanet_jax.mixers.gated_rfa import GatedRFAConfig
from deltanet_jax.mixers.gla import GLAConfig
from deltanet_jax.mixers.hgrn2 import HGRN2Config
from deltanet_jax.mixers.hyena import HyenaConfig, MultiheadHyenaConfig
from deltanet_jax.mixers.kda import KDAConfig
from deltanet_jax.mixers.linear_attention import LinearAttentionConfig
from deltanet_jax.mixers.mamba import MambaConfig
from deltanet_jax.mixers.mamba2 import Mamba2Config
from deltanet_jax.mixers.mlstm import MLSTMConfig
from deltanet_jax.mixers.retnet import RetNetConfig
from deltanet_jax.mixers.rwkv4 import RWKV4Config
from deltanet_jax.mixers.rwkv6 import RWKV6Config
from deltanet_jax.mixers.s4d import S4DConfig

Config = TypeVar("Config", bound=MixerConfig)


@dataclasses.dataclass(frozen=True)
class _Size:
  """Model shape that all families of one size share, and mixer hyperparameters of that size."""

  shape: dict[str, int]  # fields of ModelConfig
  mixers: tuple[MixerConfig, ...] = ()  # those that differ from the defaults, one per class
  window: int = 2048  # of the sliding hybrid

  @property
  def depth(self) -> int:
    return self.shape["depth"]

  def mixer(self, config: type[Config], **changes) -> Config:
    """Mixer hyperparameters of this class at this size, with some fields changed."""
    of_size = {type(mixer): mixer for mixer in self.mixers}
    return dataclasses.replace(of_size.get(config, config()), **changes)

  def pure(self, mixer: MixerConfig, **changes) -> ModelConfig:
    """Model with the same mixer in every layer."""
    return ModelConfig(mixers={mixer.kind: mixer}, pattern=(mixer.kind,), **self.shape | changes)


# The paper gives no shape for 3B; this one follows its rules (head size 128, MLP ratio 8/3).
_SIZES = {
  "340m": _Size(
    dict(width=1024, depth=24), (RetNetConfig(heads=4), GSAConfig(gate_temperature=4.0))
  ),
  "1.3b": _Size(dict(width=2048, depth=24), (RetNetConfig(heads=8),)),
  "3b": _Size(dict(width=2560, depth=36)),
  "tiny": _Size(
    dict(vocab=256, width=64, depth=4, mlp_multiple=64),
    (
      AttentionConfig(head_size=16),
      DeltaNetConfig(key_size=32, value_size=32, chunk=16),
      GatedDeltaNetConfig(key_size=16, value_size=32, chunk=16),
      DeltaProductConfig(key_size=16, value_size=32, chunk=16),
      KDAConfig(key_size=32, value_size=32, chunk=16),
      BlockDeltaNetConfig(key_size=32, block_size=16, value_size=32, chunk=16),
      RetNetConfig(heads=2, chunk=16),
      GLAConfig(heads=2, chunk=16),
      MambaConfig(chunk=16),
      LinearAttentionConfig(heads=2, chunk=16),
      GatedRFAConfig(head_size=32, features=16, chunk=16),
      DFWConfig(head_size=32, chunk=16),
      ABCConfig(heads=2, slots=8, chunk=16),
      GSAConfig(heads=2, slots=8, chunk=16),
      Mamba2Config(head_size=16, state_size=16, chunk=16),
      MLSTMConfig(heads=2, chunk=16),
      HGRN2Config(key_size=32, chunk=16),
      RWKV4Config(chunk=16),
      RWKV6Config(head_size=32, shift_rank=8, decay_rank=8, chunk=16),
      S4DConfig(state_size=16),
      HyenaConfig(length=256, features=9, filter_width=16),
      MultiheadHyenaConfig(length=256, features=9, filter_width=16),
    ),
    window=16,
  ),
}


def _sliding_hybrid(size: _Size) -> ModelConfig:
  """DeltaNet and sliding-window attention in alternate layers."""
  window = size.mixer(AttentionConfig, window=size.window)
  mixers = {"deltanet": size.mixer(DeltaNetConfig), "window": window}
  return ModelConfig(mixers=mixers, pattern=("deltanet", "window"), **size.shape)


def _global_hybrid(size: _Size) -> ModelConfig:
  """DeltaNet, with global attention in layers 2 and depth / 2 + 1, counted from 1."""
  attention_layers = (2, size.depth // 2 + 1)
  pattern = tuple("global" if i + 1 in attention_layers else "deltanet" for i in range(size.depth))
  mixers = {"deltanet": size.mixer(DeltaNetConfig), "global": size.mixer(AttentionConfig)}
  return ModelConfig(mixers=mixers, pattern=pattern, **size.shape)


def _mamba(size: _Size, mixer: MixerConfig) -> ModelConfig:
  """Mamba and Mamba-2 have no MLP and twice the layers."""
  return size.pure(mixer, depth=2 * size.depth, mlp_ratio=0.0, norm_eps=1e-5)


def _gated_deltanet(size: _Size, mixer: MixerConfig) -> ModelConfig:
  """At most 21 layers, because each has more parameters."""
  return size.pure(mixer, depth=min(size.depth, 21))


def _rwkv(size: _Size, mixer: MixerConfig, mlp_ratio: float) -> ModelConfig:
  """RWKV's channel mix as the MLP, and LayerNorms, one of them after the embedding."""
  norms = dict(norm="layer", embedding_norm=True, norm_eps=1e-5)
  return size.pure(mixer, mlp=mixer.kind, mlp_ratio=mlp_ratio, **norms)


def _hyena(size: _Size, mixer: MixerConfig) -> ModelConfig:
  """1.5 times the layers.

  The SwiGLU has about as many parameters as the published MLP of two d x 2d matrices.
  """
  return size.pure(mixer, depth=3 * size.depth // 2, mlp_ratio=2.0)


_FAMILIES: dict[str, Callable[[_Size], ModelConfig]] = {
  "deltanet": lambda s: s.pure(s.mixer(DeltaNetConfig)),
  "deltanet-noconv": lambda s: s.pure(s.mixer(DeltaNetConfig, conv=0)),
  "deltanet-sliding": _sliding_hybrid,
  "deltanet-global": _global_hybrid,
  "transformer": lambda s: s.pure(s.mixer(AttentionConfig)),
  "gated-deltanet": lambda s: _gated_deltanet(s, s.mixer(GatedDeltaNetConfig)),
  "deltaproduct": lambda s: _gated_deltanet(s, s.mixer(DeltaProductConfig)),
  "kda": lambda s: s.pure(s.mixer(KDAConfig)),
  "block-deltanet": lambda s: s.pure(s.mixer(BlockDeltaNetConfig)),
  "retnet": lambda s: s.pure(s.mixer(RetNetConfig), mlp_ratio=2.0),
  "gla": lambda s: s.pure(s.mixer(GLAConfig)),
  "gla-conv": lambda s: s.pure(s.mixer(GLAConfig, conv=4)),
  "mamba": lambda s: _mamba(s, s.mixer(MambaConfig)),
  "mamba-noconv": lambda s: _mamba(s, s.mixer(MambaConfig, conv=0)),
  "linear-attention": lambda s: s.pure(s.mixer(LinearAttentionConfig)),
  "gated-rfa": lambda s: s.pure(s.mixer(GatedRFAConfig)),
  "dfw": lambda s: s.pure(s.mixer(DFWConfig)),
  "abc": lambda s: s.pure(s.mixer(ABCConfig)),
  "gsa": lambda s: s.pure(s.mixer(GSAConfig)),
  "mamba2": lambda s: _mamba(s, s.mixer(Mamba2Config)),
  "mlstm": lambda s: s.pure(s.mixer(MLSTMConfig), mlp_multiple=64, logit_cap=30.0),
  "hgrn2": lambda s: s.pure(s.mixer(HGRN2Config)),
  "rwkv4": lambda s: _rwkv(s, s.mixer(RWKV4Config), 4.0),
  "rwkv6": lambda s: _rwkv(s, s.mixer(RWKV6Config), 3.5),
  "s4d": lambda s: s.pure(s.mixer(S4DConfig)),
  "hyena": lambda s: _hyena(s, s.mixer(HyenaConfig)),
  "multihead-hyena": lambda s: _hyena(s, s.mixer(MultiheadHyenaConfig)),
}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
# The paper mentions only DeltaNet at 3B.
PRESETS: tuple[str, ...] = tuple(
  f"{family}-{size}"
  for size in _SIZES
  for family in _FAMILIES
  if size != "3b" or family.split("-")[0] == "deltanet"
)


def preset(name: str, **changes) -> ModelConfig:
  """Return a new model configuration by preset name, with some hyperparameters changed.

  Args:
    name: one of `PRESETS`.
    changes: fields of the model or of its mixer. A field that several mixers of a hybrid have is
      ambiguous: pass `mixers=`.

  Raises:
    ValueError: unknown preset or field, ambiguous field, or invalid value.
  """
  if name not in PRESETS:
    raise ValueError(
      f"preset is {name!r}{nearest(name, PRESETS)}, expected one of {list(PRESETS)}."
    )
  family, size = name.rsplit("-", 1)
  cfg = _FAMILIES[family](_SIZES[size])
  model_fields = {field.name for field in dataclasses.fields(ModelConfig)}
  cfg = dataclasses.replace(cfg, **{k: v for k, v in changes.items() if k in model_fields})
  mixer_changes = {k: v for k, v in changes.items() if k not in model_fields}
  cfg.mixers = _change_mixers(cfg.mixers, mixer_changes, model_fields)
  cfg.validate()
  return cfg


def _change_mixers(mixers: dict[str, MixerConfig], changes: dict, model_fields: set[str]) -> dict:
  """Apply each change to the one mixer that has the field."""
  fields = {name: {x.name for x in dataclasses.fields(mixer)} for name, mixer in mixers.items()}
  mixers = dict(mixers)
  for field, value in changes.items():
    having = [name for name in mixers if field in fields[name]]
    if not having:
      known = model_fields.union(*fields.values())
      raise ValueError(
        f"neither the model nor its mixers {list(mixers)} have a field {field!r}"
        f"{nearest(field, known)}."
      )
    if len(having) > 1:
      raise ValueError(f"{field} is a field of the mixers {having}: change one of them by mixers=.")
    mixers[having[0]] = dataclasses.replace(mixers[having[0]], **{field: value})
  return mixers
