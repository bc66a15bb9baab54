"""Every hyper-parameter of a model, with its default."""

import dataclasses
import functools
import math
from typing import Literal, get_args

Activation = Literal["silu", "relu", "elu", "identity"]
Remat = Literal["none", "full", "dots"]
# How the delta rule is computed, as `deltanet_jax.ops.delta_rule` names it.
DeltaRule = Literal[
  "recurrent", "chunkwise", "parallel", "pallas_tpu", "pallas_gpu", "triton", "by_platform"
]
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


def _check_chunk(chunk: int | None):
  power = chunk is None or (chunk > 0 and chunk & (chunk - 1) == 0)
  _check(power, f"chunk is {chunk!r}, expected a power of two.")


def _check_conv(conv: int):
  _check(conv == 0 or conv > 1, f"conv is {conv!r}, expected a width above 1, or 0 for none.")


def _check_delta_rule(config):
  _check_conv(config.conv)
  _check_chunk(config.chunk)
  if config.implementation is not None:
    _check_one_of("implementation", config.implementation, DeltaRule)


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
  chunk: int | None = None  # None: the best of the implementation
  implementation: DeltaRule | None = None  # None: the fastest of this process's platform

  def validate(self):
    _check_positive(self, "heads", "key_size", "value_size")
    _check_one_of("activation", self.activation, Activation)
    _check_one_of("norm", self.norm, Literal["l2", "l1"])
    _check_delta_rule(self)


@_config
class GatedDeltaNetConfig:
  heads: int | None = None  # None: keys fill three quarters of the width
  key_size: int = 256
  value_size: int = 512
  conv: int = 4
  negative_eigenvalues: bool = False
  output_gate: bool = True
  chunk: int | None = None  # None: the best of the implementation
  implementation: DeltaRule | None = None  # None: the fastest of this process's platform

  def validate(self):
    _check_positive(self, "heads", "key_size", "value_size")
    _check_delta_rule(self)


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


@_config
class DataConfig:
  corpus: str = ""  # folder that experiments.prepare_data wrote; empty: the novels shipped here
  length: int = 2048  # tokens per row
  batch: int = 256  # rows per update, over all hosts
  workers: int = 0  # threads that read ahead

  def validate(self):
    _check_positive(self, "length", "batch")
    _check(self.workers >= 0, f"workers is {self.workers}, expected 0 or more.")


@_config
class OptimizerConfig:
  """AdamW with a cosine after a linear warm-up; the defaults are the paper's (appendix A.1)."""

  peak: float = 3e-4
  initial: float = 3e-5
  final: float = 3e-5
  warmup_tokens: int = 500_000_000
  weight_decay: float = 0.01  # not of norms, biases and decay rates
  clip: float = 1.0  # of the gradient's norm
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8

  def validate(self):
    _check_positive(self, "peak", "clip", "eps")
    for name in ("initial", "final", "warmup_tokens", "weight_decay", "b1", "b2"):
      value = getattr(self, name)
      _check(value >= 0, f"{name} is {value!r}, expected 0 or more.")


@_config
class MeshConfig:
  """Devices along each axis of the mesh; -1 takes what the others leave."""

  data: int = -1  # copies of the model
  fsdp: int = 1  # weights and optimiser are split, rows too
  tensor: int = 1  # heads, the MLP's width and the vocabulary are split
  sequence: int = 1  # tokens are split, and heads while they are mixed

  def sizes(self) -> dict[str, int]:
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def validate(self):
    for name, size in self.sizes().items():
      _check(size > 0 or size == -1, f"mesh.{name} is {size}, expected a positive number or -1.")
    _check(list(self.sizes().values()).count(-1) <= 1, "mesh has -1 twice, expected it once.")


@_config
class CheckpointConfig:
  every: int = 1000  # updates
  keep: int = 2  # the newest so many
  keep_every: int | None = None  # and for ever those at multiples of this

  def validate(self):
    _check_positive(self, "every", "keep", "keep_every")


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainConfig:
  """One training run; a file in experiments/configs returns one."""

  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  tokens: int = 15_000_000_000  # seen in all
  grad_accum: int = 1  # parts of a batch, one after the other
  loss_chunk: int = 512  # tokens of a row whose logits exist at a time
  seed: int = 0
  log_every: int = 10  # updates
  eval_every: int = 1000
  eval_batches: int | None = None  # None: the whole validation split
  max_bad_updates: int = 10  # in a row with gradients that are not finite, then it stops

  @property
  def steps(self) -> int:
    """Updates that `tokens` make."""
    return max(self.tokens // (self.data.batch * self.data.length), 1)

  def validate(self):
    for part in (self.model, self.data, self.optimizer, self.mesh, self.checkpoint):
      part.validate()
    names = ("tokens", "grad_accum", "loss_chunk", "log_every", "eval_every", "eval_batches")
    _check_positive(self, *names, "max_bad_updates")
    batch = self.data.batch
    _check(
      batch % self.grad_accum == 0,
      f"data.batch is {batch}, expected a multiple of grad_accum {self.grad_accum}.",
    )
    per_row = self.data.batch * self.data.length
    _check(self.tokens >= per_row, f"tokens is {self.tokens}, less than one batch of {per_row}.")


def to_json(cfg: TrainConfig | ModelConfig) -> dict:
  """The configuration as JSON has it; a mixer's says its class."""
  values = dataclasses.asdict(cfg)
  model, own = (values["model"], cfg.model) if isinstance(cfg, TrainConfig) else (values, cfg)
  for name, mixer in own.mixers.items():
    model["mixers"][name]["class"] = type(mixer).__name__
  model["pattern"] = list(model["pattern"])
  return values


def from_json(values: dict) -> TrainConfig:
  """The inverse of `to_json` for a run; a field that no longer exists is an error."""
  classes = {mixer.__name__: mixer for mixer in get_args(MixerConfig)}
  try:
    model = dict(values["model"])
    model["pattern"] = tuple(model["pattern"])
    model["mixers"] = {
      name: classes[mixer["class"]](**{k: v for k, v in mixer.items() if k != "class"})
      for name, mixer in model["mixers"].items()
    }
    parts = dict(
      model=ModelConfig(**model),
      data=DataConfig(**values["data"]),
      optimizer=OptimizerConfig(**values["optimizer"]),
      mesh=MeshConfig(**values["mesh"]),
      checkpoint=CheckpointConfig(**values["checkpoint"]),
    )
    return TrainConfig(**values | parts)
  except (KeyError, TypeError) as e:
    raise ValueError(f"this is no configuration of this version ({e!r}).") from e
