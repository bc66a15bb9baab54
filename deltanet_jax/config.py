"""Every setting of a training run but those of mixers, with defaults; to and from JSON."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal, get_args

Remat = Literal["none", "full", "dots"]
Dtype = Literal["float32", "bfloat16", "float64"]
Mlp = Literal["swiglu", "gelu", "identity", "rwkv4", "rwkv6"]
Norm = Literal["rms", "layer"]
OutputInit = Literal["plain", "mlp", "all"]

# Not frozen, because command-line overrides assign in place; nothing changes one after validate().
settings = functools.partial(dataclasses.dataclass, kw_only=True, slots=True, unsafe_hash=True)


def check(condition: bool, message: str):
  if not condition:
    raise ValueError(message)


def check_one_of(name: str, value, choices):
  """Refuses a value that is none of a Literal's."""
  check(value in get_args(choices), f"{name} is {value!r}, expected one of {get_args(choices)}.")


def nearest(name: str, known: Iterable[str]) -> str:
  """The known names that look like an unknown one, in brackets; empty if none does."""
  near = difflib.get_close_matches(name, sorted(known))
  return f" (nearest: {', '.join(near)})" if near else ""


def check_positive(cfg, *names: str):
  """Refuses fields that are neither None nor positive."""
  for name in names:
    value = getattr(cfg, name)
    check(value is None or value > 0, f"{name} is {value!r}, expected a positive number.")


@settings
class MixerConfig:
  """Settings of a mixer; each mixer's file has its own, with the name of the mixer as `kind`."""

  kind: ClassVar[str]

  def validate(self):
    """Raises ValueError for a setting that is wrong whatever the model's width."""


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelConfig:
  """A language model; `pattern` names the mixer of each layer and repeats over the depth."""

  vocab: int = 32000
  width: int = 1024
  depth: int = 24
  mixers: dict[str, MixerConfig]  # by the name that the pattern calls them
  pattern: tuple[str, ...]  # the mixer of each layer, repeated over the depth
  # "gelu" has biases; "identity" adds the norm alone, x + norm(x); RWKV's channel mix is one MLP
  # whose two versions begin training differently.
  mlp: Mlp = "swiglu"
  mlp_ratio: float = 4.0  # SwiGLU of 2/3 of this, rounded up; 0 for no MLP
  mlp_multiple: int = 256  # of the SwiGLU's inner width
  mlp_inner: int | None = None  # None: from the ratio
  tied: bool = False  # one matrix for embedding and head
  head_bias: bool = False
  autoencoder: int = 0  # hidden layers that make all tokens of a row from its last; 0: next tokens
  positions: int = 0  # learned ones of so many tokens, added to the embedding; 0: none
  embedding_dropout: float = 0.0  # share of the embedding's numbers that are zero while training
  logit_cap: float | None = None  # logits become cap tanh(logits / cap); None: they stay
  norm: Norm = "rms"  # before mixers, MLPs and the head; "layer" has a bias
  embedding_norm: bool = False  # also after the embedding
  norm_eps: float = 1e-6
  init_std: float = 0.02
  output_init: OutputInit = "plain"  # whose output maps begin smaller, by sqrt(2 depth)
  conv_std: float | None = None  # of short convolutions at first; None: init_std
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
  def has_mlp(self) -> bool:
    """Whether a layer has a second part beside its mixer."""
    return self.mlp == "identity" or self.mlp_width > 0

  @property
  def mlp_width(self) -> int:
    """Inner width of the MLP, 0 without."""
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
    check(0 <= dropout < 1, f"embedding_dropout is {dropout}, expected 0 or more and less than 1.")
    check(not (self.tied and self.head_bias), "tied and head_bias are set, expected one of them.")
    even = self.width % 2 == 0 and self.width > 2
    check(not self.autoencoder or even, f"width is {self.width}, expected an even one above 2.")
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
  corpus: str = ""  # folder that experiments.prepare_data wrote; empty: the novels shipped here
  length: int = 2048  # tokens per row
  batch: int = 256  # rows per update, over all hosts
  scored: int | None = None  # most targets of a row that count, all other logits are left out
  workers: int = 0  # threads that read ahead

  def validate(self):
    check_positive(self, "length", "batch", "scored")
    most = self.scored is None or self.scored <= self.length
    check(most, f"scored is {self.scored}, more than the length {self.length}.")
    check(self.workers >= 0, f"workers is {self.workers}, expected 0 or more.")


@settings
class OptimizerConfig:
  """AdamW with a cosine after a linear warm-up; the defaults are the paper's (appendix A.1)."""

  learning_rate: float = 3e-4  # the highest, after the warm-up
  initial_learning_rate: float = 3e-5
  final_learning_rate: float = 3e-5
  warmup_tokens: int = 500_000_000
  rate_every: int = 1  # updates between two changes of the learning rate
  weight_decay: float = 0.01
  decay_all: bool = False  # else only the weights that their module says it is for
  clip: float | None = 1.0  # of the gradient's norm
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8

  def validate(self):
    check_positive(self, "learning_rate", "rate_every", "clip", "eps")
    rates = ("initial_learning_rate", "final_learning_rate")
    for name in (*rates, "warmup_tokens", "weight_decay", "b1", "b2"):
      value = getattr(self, name)
      check(value >= 0, f"{name} is {value!r}, expected 0 or more.")


@settings
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
      check(size > 0 or size == -1, f"mesh.{name} is {size}, expected a positive number or -1.")
    check(list(self.sizes().values()).count(-1) <= 1, "mesh has -1 twice, expected it once.")


@settings
class CheckpointConfig:
  every: int = 1000  # updates
  keep: int = 2  # the newest so many
  keep_every: int | None = None  # and for ever those at multiples of this

  def validate(self):
    check_positive(self, "every", "keep", "keep_every")


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainConfig:
  """One training run; a file in experiments/configs returns one."""

  model: ModelConfig
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  tokens: int = 15_000_000_000  # seen in all
  grad_accum: int = 1  # micro-batches of an update, one after the other
  loss_chunk: int = 512  # tokens of a row whose logits exist at a time; divides data.length
  seed: int = 0
  log_every: int = 10  # updates
  eval_every: int = 1000
  eval_batches: int | None = None  # None: the whole validation split
  stop_metric: str | None = None  # an evaluated number that ends the run above `stop_above`
  stop_above: float = 1.0
  max_bad_updates: int = 10  # in a row with gradients that are not finite, then it stops

  @property
  def steps(self) -> int:
    """Updates that `tokens` make."""
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
  """The configuration as JSON has it; a mixer's says its kind."""
  values = dataclasses.asdict(cfg)
  model = values["model"]
  for name, mixer in cfg.model.mixers.items():
    model["mixers"][name] = {"kind": mixer.kind} | model["mixers"][name]
  model["pattern"] = list(model["pattern"])
  return values


def from_json(values: dict, mixer_config: Callable[[str], type[MixerConfig]]) -> TrainConfig:
  """The inverse of `to_json`; a field that no longer exists is an error.

  Args:
    mixer_config: from a kind of mixer to its class of settings, `deltanet_jax.mixers.mixer_config`.
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
      f"this configuration is not of this version ({e!r}): use the version that wrote it."
    ) from e
