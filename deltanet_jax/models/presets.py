"""Named models: the paper's sizes of DeltaNet, its hybrids and the baselines, and tiny ones.

A family is one row of _FAMILIES, a function from a size to a model; every preset is "family-size".
"""

import dataclasses
from collections.abc import Callable

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


@dataclasses.dataclass(frozen=True)
class _Size:
  """The shape that all families of one size share, and what it changes in each mixer's settings."""

  model: dict  # of ModelConfig
  window: int = 2048
  attention: dict = dataclasses.field(default_factory=dict)
  deltanet: dict = dataclasses.field(default_factory=dict)
  gated_deltanet: dict = dataclasses.field(default_factory=dict)  # and DeltaProduct
  kda: dict = dataclasses.field(default_factory=dict)
  block_deltanet: dict = dataclasses.field(default_factory=dict)
  retnet: dict = dataclasses.field(default_factory=dict)
  gla: dict = dataclasses.field(default_factory=dict)
  mamba: dict = dataclasses.field(default_factory=dict)
  linear_attention: dict = dataclasses.field(default_factory=dict)
  gated_rfa: dict = dataclasses.field(default_factory=dict)
  dfw: dict = dataclasses.field(default_factory=dict)
  abc: dict = dataclasses.field(default_factory=dict)
  gsa: dict = dataclasses.field(default_factory=dict)
  mamba2: dict = dataclasses.field(default_factory=dict)
  mlstm: dict = dataclasses.field(default_factory=dict)
  hgrn2: dict = dataclasses.field(default_factory=dict)
  rwkv4: dict = dataclasses.field(default_factory=dict)
  rwkv6: dict = dataclasses.field(default_factory=dict)
  s4d: dict = dataclasses.field(default_factory=dict)
  hyena: dict = dataclasses.field(default_factory=dict)

  @property
  def depth(self) -> int:
    return self.model["depth"]

  def pure(self, mixer: MixerConfig, **changes) -> ModelConfig:
    """The same mixer in every layer."""
    return ModelConfig(mixers={mixer.kind: mixer}, pattern=(mixer.kind,), **self.model | changes)


# The paper gives no shape for 3B; this one keeps its rules (head 128, MLP 8/3).
_SIZES = {
  "340m": _Size(dict(width=1024, depth=24), retnet=dict(heads=4), gsa=dict(gate_temperature=4.0)),
  "1.3b": _Size(dict(width=2048, depth=24), retnet=dict(heads=8)),
  "3b": _Size(dict(width=2560, depth=36)),
  "tiny": _Size(
    dict(vocab=256, width=64, depth=4, mlp_multiple=64),
    window=16,
    attention=dict(head_size=16),
    deltanet=dict(key_size=32, value_size=32, chunk=16),
    gated_deltanet=dict(key_size=16, value_size=32, chunk=16),
    kda=dict(key_size=32, value_size=32, chunk=16),
    block_deltanet=dict(key_size=32, block_size=16, value_size=32, chunk=16),
    retnet=dict(heads=2, chunk=16),
    gla=dict(heads=2, chunk=16),
    mamba=dict(chunk=16),
    linear_attention=dict(heads=2, chunk=16),
    gated_rfa=dict(head_size=32, features=16, chunk=16),
    dfw=dict(head_size=32, chunk=16),
    abc=dict(heads=2, slots=8, chunk=16),
    gsa=dict(heads=2, slots=8, chunk=16),
    mamba2=dict(head_size=16, state_size=16, chunk=16),
    mlstm=dict(heads=2, chunk=16),
    hgrn2=dict(key_size=32, chunk=16),
    rwkv4=dict(chunk=16),
    rwkv6=dict(head_size=32, shift_rank=8, decay_rank=8, chunk=16),
    s4d=dict(state_size=16),
    hyena=dict(length=256, features=9, filter_width=16),
  ),
}


def _sliding_hybrid(size: _Size) -> ModelConfig:
  """A sliding window in every other layer, beginning with the second."""
  window = AttentionConfig(window=size.window, **size.attention)
  mixers = {"deltanet": DeltaNetConfig(**size.deltanet), "window": window}
  return ModelConfig(mixers=mixers, pattern=("deltanet", "window"), **size.model)


def _global_hybrid(size: _Size) -> ModelConfig:
  """Global attention in the second layer and in layer depth / 2 + 1, counted from 1."""
  attending = (2, size.depth // 2 + 1)
  pattern = tuple("global" if i + 1 in attending else "deltanet" for i in range(size.depth))
  attention = AttentionConfig(**size.attention)
  mixers = {"deltanet": DeltaNetConfig(**size.deltanet), "global": attention}
  return ModelConfig(mixers=mixers, pattern=pattern, **size.model)


def _mamba(size: _Size, **changes) -> ModelConfig:
  """No MLP, so twice the layers; its norms have another epsilon."""
  mixer = MambaConfig(**size.mamba | changes)
  return size.pure(mixer, depth=2 * size.depth, mlp_ratio=0.0, norm_eps=1e-5)


def _rwkv(size: _Size, mixer: MixerConfig, mlp_ratio: float) -> ModelConfig:
  """Its own channel mix in place of the MLP; LayerNorms, one of them after the embedding."""
  norms = dict(norm="layer", embedding_norm=True, norm_eps=1e-5)
  return size.pure(mixer, mlp=mixer.kind, mlp_ratio=mlp_ratio, **norms)


def _hyena(size: _Size, mixer: MixerConfig) -> ModelConfig:
  """Half as many layers again; the MLP has about as many weights as the published one of two
  matrices, d x 2d each.
  """
  return size.pure(mixer, depth=3 * size.depth // 2, mlp_ratio=2.0)


_FAMILIES: dict[str, Callable[[_Size], ModelConfig]] = {
  "deltanet": lambda s: s.pure(DeltaNetConfig(**s.deltanet)),
  "deltanet-noconv": lambda s: s.pure(DeltaNetConfig(**s.deltanet, conv=0)),
  "deltanet-sliding": _sliding_hybrid,
  "deltanet-global": _global_hybrid,
  "transformer": lambda s: s.pure(AttentionConfig(**s.attention)),
  "gated-deltanet": lambda s: s.pure(
    GatedDeltaNetConfig(**s.gated_deltanet), depth=min(s.depth, 21)
  ),
  "deltaproduct": lambda s: s.pure(DeltaProductConfig(**s.gated_deltanet), depth=min(s.depth, 21)),
  "kda": lambda s: s.pure(KDAConfig(**s.kda)),
  "block-deltanet": lambda s: s.pure(BlockDeltaNetConfig(**s.block_deltanet)),
  "retnet": lambda s: s.pure(RetNetConfig(**s.retnet), mlp_ratio=2.0),
  "gla": lambda s: s.pure(GLAConfig(**s.gla)),
  "gla-conv": lambda s: s.pure(GLAConfig(**s.gla, conv=4)),
  "mamba": _mamba,
  "mamba-noconv": lambda s: _mamba(s, conv=0),
  "linear-attention": lambda s: s.pure(LinearAttentionConfig(**s.linear_attention)),
  "gated-rfa": lambda s: s.pure(GatedRFAConfig(**s.gated_rfa)),
  "dfw": lambda s: s.pure(DFWConfig(**s.dfw)),
  "abc": lambda s: s.pure(ABCConfig(**s.abc)),
  "gsa": lambda s: s.pure(GSAConfig(**s.gsa)),
  "mamba2": lambda s: s.pure(
    Mamba2Config(**s.mamba2), depth=2 * s.depth, mlp_ratio=0.0, norm_eps=1e-5
  ),
  "mlstm": lambda s: s.pure(MLSTMConfig(**s.mlstm), mlp_multiple=64, logit_cap=30.0),
  "hgrn2": lambda s: s.pure(HGRN2Config(**s.hgrn2)),
  "rwkv4": lambda s: _rwkv(s, RWKV4Config(**s.rwkv4), 4.0),
  "rwkv6": lambda s: _rwkv(s, RWKV6Config(**s.rwkv6), 3.5),
  "s4d": lambda s: s.pure(S4DConfig(**s.s4d)),
  "hyena": lambda s: _hyena(s, HyenaConfig(**s.hyena)),
  "multihead-hyena": lambda s: _hyena(s, MultiheadHyenaConfig(**s.hyena)),
}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
# Of 3B the paper has DeltaNet alone.
PRESETS: tuple[str, ...] = tuple(
  f"{family}-{size}"
  for size in _SIZES
  for family in _FAMILIES
  if size != "3b" or family.split("-")[0] == "deltanet"
)


def preset(name: str, **changes) -> ModelConfig:
  """A fresh configuration of this name with some fields changed, of the model or of its mixer.

  A field that several mixers of a hybrid have is changed by `mixers=`.
  """
  if name not in PRESETS:
    raise ValueError(
      f"preset is {name!r}{nearest(name, PRESETS)}, expected one of {list(PRESETS)}."
    )
  family, size = name.rsplit("-", 1)
  cfg = _FAMILIES[family](_SIZES[size])
  own = {field.name for field in dataclasses.fields(ModelConfig)}
  cfg = dataclasses.replace(cfg, **{k: v for k, v in changes.items() if k in own})
  of_mixers = {k: v for k, v in changes.items() if k not in own}
  cfg.mixers = _changed(cfg.mixers, of_mixers, own)
  cfg.validate()
  return cfg


def _changed(mixers: dict[str, MixerConfig], changes: dict, own: set[str]) -> dict:
  """The mixers with fields changed, each of the one that has it."""
  fields = {name: {x.name for x in dataclasses.fields(mixer)} for name, mixer in mixers.items()}
  mixers = dict(mixers)
  for field, value in changes.items():
    having = [name for name in mixers if field in fields[name]]
    if not having:
      known = own.union(*fields.values())
      raise ValueError(
        f"neither the model nor its mixers {list(mixers)} have a field {field!r}"
        f"{nearest(field, known)}."
      )
    if len(having) > 1:
      raise ValueError(f"{field} is a field of the mixers {having}: change one of them by mixers=.")
    mixers[having[0]] = dataclasses.replace(mixers[having[0]], **{field: value})
  return mixers
