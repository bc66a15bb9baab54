"""Convert config.json of public checkpoints to and from `ModelConfig`."""

from deltanet_jax.config import ModelConfig
from deltanet_jax.interop.fla_layers import (
  FAMILIES,
  Family,
  is_size,
  read_attention,
  write_attention,
)
from deltanet_jax.mixers.attention import AttentionConfig

# Options common to all families that determine the model, with the defaults for older files.
_OPTIONS = dict(
  vocab_size=None,
  hidden_size=None,
  num_hidden_layers=None,
  attn=None,
  hidden_ratio=4,
  intermediate_size=None,
  norm_eps=1e-6,
  tie_word_embeddings=False,
  initializer_range=0.02,
)
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads")
# Options with a single supported value.
_FIXED = dict(
  hidden_act=("swish", "silu"),
  attnres_block_size=(None,),
  use_l2warp=(False,),
  conv_bias=(False,),
  norm_first=(False,),
)
# Options that do not change logits.
_IGNORED = {
  "_name_or_path",
  "architectures",
  "attn_mode",
  "auto_map",
  "bos_token_id",
  "eos_token_id",
  "max_position_embeddings",
  "model_type",
  "pad_token_id",
  "transformers_version",
  "use_cache",
  "use_output_norm",
}


def from_fla(options: dict) -> ModelConfig:
  """Convert a config.json to a `ModelConfig`; raises ValueError for unsupported options."""
  o, family, dtype = _checked(options)
  width, depth = o["hidden_size"], o["num_hidden_layers"]
  attention = read_attention(o["attn"], width, depth)
  own = family.read(o)
  mixers, layers = {}, []
  for i in range(depth):
    mixer = attention.get(i, own)
    name = next((name for name, known in mixers.items() if known == mixer), None)
    if name is None:
      name = _free_name(_kind(mixer), mixers)
      mixers[name] = mixer
    layers.append(name)
  cfg = ModelConfig(
    vocab=o["vocab_size"],
    width=width,
    depth=depth,
    mixers=mixers,
    pattern=_pattern(layers),
    mlp_ratio=float(4 if o["hidden_ratio"] is None else o["hidden_ratio"]),
    mlp_inner=o["intermediate_size"],
    tied=o["tie_word_embeddings"],
    norm_eps=o["norm_eps"],
    init_std=o["initializer_range"],
    dtype=dtype,
  )
  cfg.validate()
  return cfg


def _checked(options: dict) -> tuple[dict, Family, str]:
  """Validate options; return those that determine the model, the family and the dtype."""
  kind = options.get("model_type")
  if kind is None and "config" in options:
    raise ValueError(
      "config.json belongs to a run or an export of this library, not to a public checkpoint: pass"
      " its folder as --workdir, or to load_trained."
    )
  if kind not in FAMILIES:
    raise ValueError(f"config.json has model_type = {kind!r}, expected one of {list(FAMILIES)}.")
  family = FAMILIES[kind]
  fixed = _FIXED | family.fixed
  for name, allowed in fixed.items():
    if name in options and options[name] not in allowed:
      raise ValueError(
        f"config.json has {name} = {options[name]!r}, the only supported value is {allowed[0]!r}."
      )
  missing = [name for name in _REQUIRED if options.get(name) is None]
  if missing:
    raise ValueError(f"config.json lacks {missing}.")
  for name in _REQUIRED:
    if not is_size(options[name]):
      raise ValueError(f"config.json has {name} = {options[name]!r}, expected a positive integer.")
  defaults = _OPTIONS | family.options
  known = {*defaults, *fixed, *_IGNORED, *family.ignored, "dtype", "torch_dtype"}
  unknown = sorted(n for n in options if n not in known and not n.startswith("fuse_"))
  if unknown:
    raise ValueError(f"config.json has unsupported options {unknown}.")
  dtype = options.get("dtype", options.get("torch_dtype")) or "float32"
  if dtype not in ("float32", "bfloat16"):
    raise ValueError(f"config.json has dtype {dtype!r}, expected 'float32' or 'bfloat16'.")
  return {name: options.get(name, default) for name, default in defaults.items()}, family, dtype


def _kind(mixer) -> str:
  """Return the name of a mixer in a pattern, as in the presets."""
  if isinstance(mixer, AttentionConfig):
    return "window" if mixer.window else "global"
  return mixer.kind


def _free_name(kind: str, taken) -> str:
  names = (kind, *(f"{kind}{i}" for i in range(2, len(taken) + 2)))
  return next(name for name in names if name not in taken)


def _pattern(layers: list[str]) -> tuple[str, ...]:
  """Return the shortest prefix that repeats at least twice to give all layers; else all layers."""
  periods = (*range(1, len(layers) // 2 + 1), len(layers))
  return tuple(
    layers[: next(p for p in periods if all(x == layers[i % p] for i, x in enumerate(layers)))]
  )


def to_fla(cfg: ModelConfig) -> dict:
  """Convert a `ModelConfig` to config.json; raises ValueError if the format cannot represent it."""
  attention = {
    i: cfg.mixers[name]
    for i, name in enumerate(cfg.layers)
    if isinstance(cfg.mixers[name], AttentionConfig)
  }
  own = [mixer for mixer in cfg.mixers.values() if not isinstance(mixer, AttentionConfig)]
  kinds = {family.config: kind for kind, family in FAMILIES.items()}
  if len(own) != 1 or type(own[0]) not in kinds:
    names = sorted({type(mixer).__name__ for mixer in cfg.mixers.values()})
    raise ValueError(
      f"the model has the mixers {names}; the format supports only one kind of DeltaNet or Gated"
      " DeltaNet layer, optionally with attention in other layers."
    )
  if not cfg.mlp_width:
    raise ValueError("the model has no MLP; the format supports only layers with one.")
  supported = dict(mlp="swiglu", norm="rms", embedding_norm=False, logit_cap=None)
  supported |= dict(head_bias=False, autoencoder=0, positions=0)
  for name, value in supported.items():
    if getattr(cfg, name) != value:
      raise ValueError(
        f"the model has {name} = {getattr(cfg, name)!r}; the format supports only {value!r}."
      )
  if cfg.dtype == "float64":
    raise ValueError("the model computes in float64; the format supports float32 and bfloat16.")
  kind = kinds[type(own[0])]
  family = FAMILIES[kind]
  return family.write(own[0], cfg.width) | dict(
    architectures=[family.architecture],
    model_type=kind,
    attn=write_attention(attention, cfg.width),
    attn_mode="chunk",
    vocab_size=cfg.vocab,
    hidden_size=cfg.width,
    num_hidden_layers=cfg.depth,
    hidden_act="swish",
    hidden_ratio=cfg.mlp_ratio,
    intermediate_size=cfg.mlp_width,
    norm_eps=cfg.norm_eps,
    tie_word_embeddings=cfg.tied,
    initializer_range=cfg.init_std,
    dtype=cfg.dtype,
  )
