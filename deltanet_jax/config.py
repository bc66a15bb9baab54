"""Every hyper-parameter of a model, with its default."""

import dataclasses
import functools
import math
from typing import Literal, get_args

Activation = Literal["silu", "relu", "elu", "identity"]
Remat = Literal["none", "full", "dots"]
Dtype = Literal["float32", "bfloat16", "float64"]

# Not frozen, because command-line overrides assign in place; nothing changes one after validate().
_config = functools.partial(dataclasses.dataclass, kw_only=True, slots=True, unsafe_hash=True)


def _check(condition: bool, message: str):
  if not condition:
    raise ValueError(message)


def _check_one_of(name: str, value, choices):
  _check(value in get_args(choices), f"{name} is {value!r}, expected one of {get_args(choices)}.")


def _check_positive(config, *names: str):
  for name in names:
    value = getattr(config, name)
    _check(value is None or value > 0, f"{name} is {value!r}, expected a positive number.")


def _check_chunk(chunk: int):
  _check(chunk > 0 and chunk & (chunk - 1) == 0, f"chunk is {chunk!r}, expected a power of two.")


def _check_conv(conv: int):
  _check(conv == 0 or conv > 1, f"conv is {conv!r}, expected a width above 1, or 0 for none.")


@_config
class DeltaNetConfig:
  heads: int | None = None  # None: as many as fill the width with keys
  key_size: int = 128  # per head
  value_size: int = 128
  activation: Activation = "silu"  # of q and k; "elu" is 1 + elu
  norm: Literal["l2", "l1"] = "l2"  # of q and k
  conv: int = 4  # width of the short convolution, 0 for none
  negative_eigenvalues: bool = False  # beta in (0, 2)
  output_gate: bool = False
  chunk: int = 64

  def validate(self):
    _check_positive(self, "heads", "key_size", "value_size")
    _check_one_of("activation", self.activation, Activation)
    _check_one_of("norm", self.norm, Literal["l2", "l1"])
    _check_conv(self.conv)
    _check_chunk(self.chunk)


@_config
class GatedDeltaNetConfig:
  heads: int | None = None  # None: keys fill three quarters of the width
  key_size: int = 256
  value_size: int = 512
  conv: int = 4
  negative_eigenvalues: bool = False
  output_gate: bool = True
  chunk: int = 64

  def validate(self):
    _check_positive(self, "heads", "key_size", "value_size")
    _check_conv(self.conv)
    _check_chunk(self.chunk)


@_config
class AttentionConfig:
  heads: int | None = None  # None: as many as fill the width
  head_size: int = 64
  kv_heads: int | None = None  # None: as many as heads
  window: int | None = None  # keys a token sees, its own included; None: all before it
  rope_base: float = 10000.0

  def validate(self):
    _check_positive(self, "heads", "head_size", "kv_heads", "window", "rope_base")
    _check(self.head_size % 2 == 0, f"head_size is {self.head_size}, expected an even one.")


@_config
class RetNetConfig:
  heads: int = 4
  expand_k: float = 1.0  # width of all keys together, over the model's
  expand_v: float = 2.0
  rope_base: float = 10000.0
  chunk: int = 64

  def validate(self):
    _check_positive(self, "heads", "expand_k", "expand_v", "rope_base")
    _check_chunk(self.chunk)


@_config
class GLAConfig:
  heads: int = 4
  expand_k: float = 0.5
  expand_v: float = 1.0
  gate_rank: int = 16
  gate_temperature: float = 16.0  # log decay = log sigmoid / temperature
  conv: int = 0
  chunk: int = 64

  def validate(self):
    _check_positive(self, "heads", "expand_k", "expand_v", "gate_rank", "gate_temperature")
    _check_conv(self.conv)
    _check_chunk(self.chunk)


@_config
class MambaConfig:
  expand: int = 2  # channels over the model's width
  state_size: int = 16  # per channel
  dt_rank: int | None = None  # None: a sixteenth of the width, rounded up
  conv: int = 4
  chunk: int = 64

  def validate(self):
    _check_positive(self, "expand", "state_size", "dt_rank")
    _check_conv(self.conv)
    _check_chunk(self.chunk)


MixerConfig = (
  DeltaNetConfig | GatedDeltaNetConfig | AttentionConfig | RetNetConfig | GLAConfig | MambaConfig
)


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelConfig:
  """A language model; `pattern` names the mixer of each layer and repeats over the depth."""

  vocab: int = 32000
  width: int = 1024
  depth: int = 24
  mixers: dict[str, MixerConfig] = dataclasses.field(
    default_factory=lambda: {"deltanet": DeltaNetConfig()}
  )
  pattern: tuple[str, ...] = ("deltanet",)
  mlp_ratio: float = 4.0  # SwiGLU of 2/3 of this, rounded up; 0 for no MLP
  mlp_multiple: int = 256
  mlp_inner: int | None = None  # None: from the ratio
  tied: bool = False  # one matrix for embedding and head
  norm_eps: float = 1e-6
  init_std: float = 0.02
  dtype: Dtype = "float32"  # of the computation; parameters are float32
  remat: Remat = "none"  # what the backward recomputes: nothing, all, or all but products
  scan: bool = True  # one traced layer for all that repeat; False unrolls them

  def __hash__(self):
    # The mixers are a dictionary; the text shows every field.
    return hash(repr(self))

  @property
  def layers(self) -> tuple[str, ...]:
    """The mixer's name for each of the `depth` layers."""
    return tuple(self.pattern[i % len(self.pattern)] for i in range(self.depth))

  @property
  def mlp_width(self) -> int:
    """Inner width of the SwiGLU, 0 without."""
    if self.mlp_inner is not None:
      return self.mlp_inner
    return self.mlp_multiple * math.ceil(
      int(self.width * self.mlp_ratio * 2 / 3) / self.mlp_multiple
    )

  def validate(self):
    _check_positive(self, "vocab", "width", "depth", "mlp_multiple", "norm_eps", "init_std")
    _check(self.mlp_ratio >= 0, f"mlp_ratio is {self.mlp_ratio}, expected 0 or more.")
    _check(len(self.pattern) > 0, "pattern is empty, expected the names of mixers.")
    _check(
      len(self.pattern) <= self.depth,
      f"pattern has {len(self.pattern)} layers, but depth is {self.depth}.",
    )
    used, known = set(self.pattern), set(self.mixers)
    _check(used <= known, f"pattern names {sorted(used - known)}, but mixers has {sorted(known)}.")
    _check(known <= used, f"mixers has {sorted(known - used)}, which pattern does not name.")
    _check_one_of("dtype", self.dtype, Dtype)
    _check_one_of("remat", self.remat, Remat)
    for mixer in self.mixers.values():
      mixer.validate()
