"""All hyperparameters of a training run except those of mixers, with JSON serialization.

Each field carries its help text as metadata; `--help` of commands with `--config` lists them.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform, get_args

Remat = Literal["none", "full", "dots"]
Dtype = Literal["float32", "bfloat16", "float64"]
Mlp = Literal["swiglu", "gelu", "identity", "rwkv4", "rwkv6"]
Norm = Literal["rms", "layer"]
OutputInit = Literal["plain", "mlp", "all"]
Optimizer = Literal["adamw", "muon", "lion", "adafactor"]
Schedule = Literal["cosine", "wsd", "constant"]

T = TypeVar("T")


def setting(default: T, help: str) -> T:
  """A dataclass field with a default and a help text.

  The return type is that of the default, so type checkers see an ordinary field with a default.
  """
  field: Any = dataclasses.field(default=default, metadata={"help": help})
  return field


# Not frozen, because command-line overrides assign in place; nothing changes one after validate().
@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def settings(cls: type[T]) -> type[T]:
  """Class decorator: a hashable, keyword-only dataclass with slots."""
  return dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)(cls)


def help_of(field: dataclasses.Field) -> str:
  """The help text of a field; empty if it has none."""
  return field.metadata.get("help", "")


def check(condition: bool, message: str):
  """Raise ValueError with this message unless the condition holds."""
  if not condition:
    raise ValueError(message)


def check_one_of(name: str, value, choices):
  """Raise ValueError unless the value is one of a Literal's."""
  check(value in get_args(choices), f"{name} is {value!r}, expected one of {get_args(choices)}.")


def nearest(name: str, known: Iterable[str]) -> str:
  """A hint for an unknown name: similar known names in parentheses, or an empty string."""
  near = difflib.get_close_matches(name, sorted(known))
  return f" (nearest: {', '.join(near)})" if near else ""


def check_positive(cfg, *names: str):
  """Raise ValueError for fields that are neither None nor positive."""
  for name in names:
    value = getattr(cfg, name)
    check(value is None or value > 0, f"{name} is {value!r}, expected a positive number.")


@settings
class MixerConfig:
  """Base class of mixer hyperparameters; each mixer's file defines its own, named by `kind`."""

  kind: ClassVar[str]

  def validate(self):
    """Raise ValueError for a value that is invalid for every model width."""


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelConfig:
  """Hyperparameters of a language model; `pattern` names the mixer of each layer, cyclically."""

  vocab: int = setting(32000, "Vocabulary size.")
  width: int = setting(1024, "Model width (dimension of the residual stream).")
  depth: int = setting(24, "Number of layers.")
  mixers: dict[str, MixerConfig] = dataclasses.field(
    metadata={"help": "Mixer hyperparameters, by the names used in pattern."}
  )
  pattern: tuple[str, ...] = dataclasses.field(
    metadata={"help": "Names of the layers' mixers, repeated cyclically over the depth."}
  )
  # The two RWKV channel mixes are one MLP with different initialization.
  mlp: Mlp = setting(
    "swiglu", "MLP: swiglu, gelu (with biases), identity (x + norm(x)), rwkv4 or rwkv6 channel mix."
  )
  mlp_ratio: float = setting(
    4.0, "Hidden size of the MLP over the width (SwiGLU: 2/3 of it, rounded up); 0: no MLP."
  )
  mlp_multiple: int = setting(256, "SwiGLU's hidden size is rounded up to a multiple of this.")
  mlp_inner: int | None = setting(None, "Hidden size of the MLP; None: from mlp_ratio.")
  tied: bool = setting(False, "Tie the embedding and the output head.")
  head_bias: bool = setting(False, "Add a bias to the logits.")
  autoencoder: int = setting(
    0, "Hidden layers of a decoder that predicts all tokens from the last one; 0: language model."
  )
  positions: int = setting(
    0, "Maximum sequence length of learned absolute position embeddings; 0: none."
  )
  embedding_dropout: float = setting(0.0, "Dropout rate of the embeddings during training.")
  logit_cap: float | None = setting(
    None, "Soft cap: logits become cap * tanh(logits / cap); None: no cap."
  )
  norm: Norm = setting(
    "rms", "Norm before mixers, MLPs and the head: rms (RMSNorm) or layer (LayerNorm with bias)."
  )
  embedding_norm: bool = setting(False, "Normalize the embeddings as well.")
  norm_eps: float = setting(1e-6, "Epsilon of the norms.")
  init_std: float = setting(0.02, "Standard deviation of the initial weights.")
  output_init: OutputInit = setting(
    "plain",
    "Which output projections are initialized smaller by sqrt(2 depth): plain (none), mlp or all.",
  )
  conv_std: float | None = setting(
    None, "Standard deviation of initial short convolutions; None: init_std."
  )
  dtype: Dtype = setting("float32", "Computation dtype; parameters are float32.")
  remat: Remat = setting(
    "none", "Rematerialization in the backward pass: none, full, or dots (save matmul outputs)."
  )
  scan: bool = setting(True, "Scan over repeated layers, compiled once; False: unroll them.")

  def __hash__(self):
    # A dict is unhashable; the repr contains every field.
    return hash(repr(self))

  @property
  def layers(self) -> tuple[str, ...]:
    """The mixer name of each of the `depth` layers."""
    return tuple(self.pattern[i % len(self.pattern)] for i in range(self.depth))

  @property
  def has_mlp(self) -> bool:
    """Whether a layer has an MLP branch after its mixer."""
    return self.mlp == "identity" or self.mlp_width > 0

  @property
  def mlp_width(self) -> int:
    """Hidden size of the MLP; 0 without one."""
    if self.mlp == "identity":
      return 0
    if self.mlp_inner is not None:
      return self.mlp_inner
    if self.mlp != "swiglu":
      return int(self.width * self.mlp_ratio)
    return self.mlp_multiple * math.ceil(
      int(self.width * self.mlp_ratio * 2 / 3) / self.mlp_multiple
    )

  def validate(self):
    check_positive(self, "vocab", "width", "depth", "mlp_multiple", "norm_eps", "init_std")
    check_positive(self, "logit_cap", "conv_std")
    for name in ("autoencoder", "positions"):
      check(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}, expected 0 or more.")
    dropout = self.embedding_dropout
    check(0 <= dropout < 1, f"embedding_dropout is {dropout}, expected a rate in [0, 1).")
    check(
      not (self.tied and self.head_bias), "tied and head_bias are both set, expected at most one."
    )
    even = self.width % 2 == 0 and self.width > 2
    check(not self.autoencoder or even, f"width is {self.width}, expected an even number above 2.")
    check(self.mlp_ratio >= 0, f"mlp_ratio is {self.mlp_ratio}, expected 0 or more.")
    check(len(self.pattern) > 0, "pattern is empty, expected the names of mixers.")
    check(
      len(self.pattern) <= self.depth,
      f"pattern has {len(self.pattern)} layers, but depth is {self.depth}.",
    )
    used, known = set(self.pattern), set(self.mixers)
    check(used <= known, f"pattern names {sorted(used - known)}, but mixers has {sorted(known)}.")
    check(known <= used, f"mixers has {sorted(known - used)}, which pattern does not name.")
    check_one_of("dtype", self.dtype, Dtype)
    check_one_of("remat", self.remat, Remat)
    check_one_of("mlp", self.mlp, Mlp)
    check_one_of("norm", self.norm, Norm)
    check_one_of("output_init", self.output_init, OutputInit)
    for mixer in self.mixers.values():
      mixer.validate()


@settings
class DataConfig:
  """Training data and batch shape."""

  corpus: str = setting(
    "", "Folder written by experiments.prepare_data; empty: the novels shipped with the package."
  )
  length: int = setting(2048, "Sequence length in tokens.")
  batch: int = setting(256, "Global batch size: sequences per update, over all hosts.")
  scored: int | None = setting(
    None,
    "Maximum number of target positions per sequence that enter the loss; other logits are not"
    " computed. None: all positions.",
  )
  workers: int = setting(0, "Threads that prefetch batches; 0: read synchronously.")

  def validate(self):
    check_positive(self, "length", "batch", "scored")
    fits = self.scored is None or self.scored <= self.length
    check(fits, f"scored is {self.scored}, expected at most the length {self.length}.")
    check(self.workers >= 0, f"workers is {self.workers}, expected 0 or more.")


@settings
class OptimizerConfig:
  """Optimizer and learning rate schedule; the defaults are the paper's (appendix A.1).

  `train(..., optimizer=...)` takes an optax optimizer instead; these settings are then unused.
  """

  name: Optimizer = setting(
    "adamw",
    "Optimizer: adamw, muon (matrices by Muon with the update RMS of AdamW; embeddings, head,"
    " convolutions and vectors by AdamW), lion (needs a 3-10x lower learning rate) or adafactor"
    " (learning rate relative to the RMS of each weight, for instance 0.01).",
  )
  schedule: Schedule = setting(
    "cosine",
    "Learning rate after the warmup: cosine (decay to final_learning_rate), wsd (constant, then"
    " linear decay to final_learning_rate in the last decay_fraction) or constant.",
  )
  decay_fraction: float = setting(
    0.1, "Fraction of all training tokens in which the wsd schedule decays."
  )
  learning_rate: float = setting(3e-4, "Peak learning rate, reached after the warmup.")
  initial_learning_rate: float = setting(3e-5, "Learning rate of the first update.")
  final_learning_rate: float = setting(3e-5, "Learning rate at the end of the decay.")
  warmup_tokens: int = setting(500_000_000, "Length of the linear warmup in tokens.")
  rate_every: int = setting(1, "Updates between changes of the learning rate (step schedule).")
  weight_decay: float = setting(0.01, "Decoupled weight decay, multiplied by the learning rate.")
  decay_all: bool = setting(
    False, "Apply weight decay to all parameters; False: only to those marked by their module."
  )
  clip: float | None = setting(1.0, "Maximum global gradient norm (clipping); None: no clipping.")
  b1: float = setting(0.9, "AdamW and Lion beta1, the decay rate of the first moment.")
  b2: float = setting(0.95, "AdamW beta2, the decay rate of the second moment; Lion beta2.")
  eps: float = setting(1e-8, "AdamW epsilon.")
  momentum: float = setting(0.95, "Muon momentum (Nesterov).")

  def validate(self):
    check_one_of("optimizer.name", self.name, Optimizer)
    check_one_of("optimizer.schedule", self.schedule, Schedule)
    fraction = self.decay_fraction
    check(0 <= fraction <= 1, f"decay_fraction is {fraction}, expected a number in [0, 1].")
    check(0 <= self.momentum < 1, f"momentum is {self.momentum}, expected a number in [0, 1).")
    check_positive(self, "learning_rate", "rate_every", "clip", "eps")
    rates = ("initial_learning_rate", "final_learning_rate")
    for name in (*rates, "warmup_tokens", "weight_decay", "b1", "b2"):
      value = getattr(self, name)
      check(value >= 0, f"{name} is {value!r}, expected 0 or more.")


@settings
class MeshConfig:
  """Number of devices along each mesh axis; one of them may be -1: all remaining devices.

  `data` is plain data parallelism, `fsdp` fully sharded data parallelism (ZeRO-3), `tensor` tensor
  parallelism, `sequence` sequence (context) parallelism. deltanet_jax/sharding.py maps array axes
  to these mesh axes.
  """

  data: int = setting(-1, "Data parallel: replicas of the model; the batch is sharded.")
  fsdp: int = setting(
    1, "Fully sharded data parallel: parameters, optimizer state and batch are sharded."
  )
  tensor: int = setting(1, "Tensor parallel: heads, MLP hidden size and vocabulary are sharded.")
  sequence: int = setting(
    1, "Sequence parallel: positions are sharded; inside mixers heads are sharded instead."
  )

  def sizes(self) -> dict[str, int]:
    """Axis name to number of devices."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def validate(self):
    for name, size in self.sizes().items():
      check(size > 0 or size == -1, f"mesh.{name} is {size}, expected a positive number or -1.")
    check(
      list(self.sizes().values()).count(-1) <= 1,
      "mesh has -1 more than once, expected at most once.",
    )


@settings
class CheckpointConfig:
  """When checkpoints are saved and how many are kept."""

  every: int = setting(1000, "Updates between checkpoints.")
  keep: int = setting(2, "Number of recent checkpoints to keep.")
  keep_every: int | None = setting(
    None, "Also keep checkpoints at multiples of this many updates permanently; None: no."
  )

  def validate(self):
    check_positive(self, "every", "keep", "keep_every")


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainConfig:
  """Configuration of a training run; files in experiments/configs return one."""

  model: ModelConfig
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  tokens: int = setting(15_000_000_000, "Training tokens in total.")
  grad_accum: int = setting(
    1, "Gradient accumulation: sequential micro-batches per update; divides data.batch."
  )
  loss_chunk: int = setting(
    512, "Positions per sequence whose logits are materialized at a time; divides data.length."
  )
  seed: int = setting(0, "Random seed of initialization and data order.")
  log_every: int = setting(10, "Updates between logged training metrics.")
  eval_every: int = setting(1000, "Updates between evaluations.")
  eval_batches: int | None = setting(
    None, "Batches per evaluation; None: the full validation split."
  )
  stop_metric: str | None = setting(
    None, "Early stopping: end training when this evaluation metric exceeds stop_above."
  )
  stop_above: float = setting(1.0, "Threshold of stop_metric.")
  max_bad_updates: int = setting(
    10, "Consecutive updates with non-finite gradients after which training stops."
  )

  @property
  def steps(self) -> int:
    """Number of updates: tokens / (batch size * sequence length)."""
    return max(self.tokens // (self.data.batch * self.data.length), 1)

  def validate(self):
    for part in (self.model, self.data, self.optimizer, self.mesh, self.checkpoint):
      part.validate()
    names = ("tokens", "grad_accum", "loss_chunk", "log_every", "eval_every", "eval_batches")
    check_positive(self, *names, "max_bad_updates")
    check(0 <= self.seed < 2**32, f"seed is {self.seed}, expected 0 to 2^32 - 1.")
    batch = self.data.batch
    check(
      batch % self.grad_accum == 0,
      f"data.batch is {batch}, expected a multiple of grad_accum {self.grad_accum}.",
    )
    per_update = batch * self.data.length
    check(self.tokens >= per_update, f"tokens is {self.tokens}, less than one batch, {per_update}.")
    check(
      self.loss_chunk >= self.data.length or self.data.length % self.loss_chunk == 0,
      f"loss_chunk is {self.loss_chunk}, expected a divisor of data.length {self.data.length}.",
    )


def to_json(cfg: TrainConfig) -> dict:
  """The configuration as JSON-serializable values; each mixer's includes its `kind`."""
  values = dataclasses.asdict(cfg)
  model = values["model"]
  for name, mixer in cfg.model.mixers.items():
    model["mixers"][name] = {"kind": mixer.kind} | model["mixers"][name]
  model["pattern"] = list(model["pattern"])
  return values


def from_json(values: dict, mixer_config: Callable[[str], type[MixerConfig]]) -> TrainConfig:
  """The inverse of `to_json`.

  Args:
    mixer_config: maps a mixer's `kind` to its config class; `deltanet_jax.mixers.mixer_config`.

  Raises:
    ValueError: the values have unknown or missing fields.
  """
  try:
    model = dict(values["model"])
    model["pattern"] = tuple(model["pattern"])
    model["mixers"] = {
      name: mixer_config(mixer["kind"])(**{k: v for k, v in mixer.items() if k != "kind"})
      for name, mixer in model["mixers"].items()
    }
    sections = dict(
      model=ModelConfig(**model),
      data=DataConfig(**values["data"]),
      optimizer=OptimizerConfig(**values["optimizer"]),
      mesh=MeshConfig(**values["mesh"]),
      checkpoint=CheckpointConfig(**values["checkpoint"]),
    )
    return TrainConfig(**values | sections)
  except (KeyError, TypeError) as e:
    raise ValueError(
      f"the configuration has unknown or missing fields ({e!r}): load it with the version of"
      " deltanet-jax that wrote it."
    ) from e
