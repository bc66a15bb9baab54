"""config.json of the public DeltaNet checkpoints, to and from `ModelConfig`."""

from deltanet_jax.config import ModelConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig

# Options that the model depends on, with the default an older file leaves out.
_HONOURED = dict(
  vocab_size=None,
  hidden_size=None,
  num_hidden_layers=None,
  num_heads=None,
  expand_k=1.0,
  expand_v=1.0,
  use_gate=False,
  use_short_conv=True,
  conv_size=4,
  qk_norm="l2",
  qk_activation="silu",
  allow_neg_eigval=False,
  hidden_ratio=4,
  intermediate_size=None,
  norm_eps=1e-6,
  tie_word_embeddings=False,
  initializer_range=0.02,
)
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads")
# Options with only one value that this library computes.
_FIXED = dict(
  model_type=("delta_net",),
  hidden_act=("swish", "silu"),
  use_beta=(True,),
  attn=(None,),
  attnres_block_size=(None,),
  use_l2warp=(False,),
  conv_bias=(False,),
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
  "pad_token_id",
  "transformers_version",
  "use_cache",
  "use_output_norm",
}
_NORMS = {"l2": "l2", "sum": "l1"}
_ACTIVATIONS = ("silu", "relu", "elu", "identity")


def from_fla(options: dict) -> ModelConfig:
  """The model that a config.json describes; an option that cannot be honoured is an error."""
  options = dict(options)
  if "model_type" not in options:
    raise ValueError("config.json has no model_type, expected 'delta_net'.")
  for name, allowed in _FIXED.items():
    if name in options and options[name] not in allowed:
      raise ValueError(
        f"config.json has {name} = {options[name]!r}, and only {allowed[0]!r} can be honoured."
      )
  missing = [name for name in _NEEDED if options.get(name) is None]
  if missing:
    raise ValueError(f"config.json lacks {missing}.")
  known = {*_HONOURED, *_FIXED, *_IGNORED, "dtype", "torch_dtype"}
  unknown = sorted(n for n in options if n not in known and not n.startswith("fuse_"))
  if unknown:
    raise ValueError(
      f"config.json has options {unknown}, which this library does not know how to honour."
    )
  o = {name: options.get(name, default) for name, default in _HONOURED.items()}
  dtype = options.get("dtype", options.get("torch_dtype")) or "float32"
  if dtype not in ("float32", "bfloat16"):
    raise ValueError(f"config.json has dtype {dtype!r}, expected 'float32' or 'bfloat16'.")
  if o["qk_norm"] not in _NORMS:
    raise ValueError(f"config.json has qk_norm {o['qk_norm']!r}, expected one of {list(_NORMS)}.")
  if o["qk_activation"] not in _ACTIVATIONS:
    raise ValueError(
      f"config.json has qk_activation {o['qk_activation']!r}, expected one of {_ACTIVATIONS}."
    )
  mixer = DeltaNetConfig(
    heads=o["num_heads"],
    key_size=_head_size(o, "expand_k"),
    value_size=_head_size(o, "expand_v"),
    activation=o["qk_activation"],
    norm=_NORMS[o["qk_norm"]],
    conv=o["conv_size"] if o["use_short_conv"] else 0,
    negative_eigenvalues=o["allow_neg_eigval"],
    output_gate=o["use_gate"],
  )
  cfg = ModelConfig(
    vocab=o["vocab_size"],
    width=o["hidden_size"],
    depth=o["num_hidden_layers"],
    mixers={"deltanet": mixer},
    pattern=("deltanet",),
    mlp_ratio=float(4 if o["hidden_ratio"] is None else o["hidden_ratio"]),
    mlp_inner=o["intermediate_size"],
    tied=o["tie_word_embeddings"],
    norm_eps=o["norm_eps"],
    init_std=o["initializer_range"],
    dtype=dtype,
  )
  cfg.validate()
  return cfg


def _head_size(o, expand):
  size = int(o["hidden_size"] * o[expand])
  if size % o["num_heads"]:
    raise ValueError(
      f"config.json has {expand} {o[expand]} and hidden_size {o['hidden_size']}, which do not"
      f" divide into {o['num_heads']} heads."
    )
  return size // o["num_heads"]


def to_fla(cfg: ModelConfig) -> dict:
  """The config.json of a model that has only DeltaNet layers."""
  kinds = list(cfg.mixers.values())
  if len(kinds) != 1 or not isinstance(kinds[0], DeltaNetConfig):
    names = sorted({type(kind).__name__ for kind in kinds})
    raise ValueError(f"the model mixes tokens by {names}; the format holds only DeltaNet layers.")
  if not cfg.mlp_width:
    raise ValueError("the model has no MLP; the format holds only layers with one.")
  if cfg.dtype == "float64":
    raise ValueError("the model computes in float64; the format holds float32 or bfloat16.")
  (mixer,) = kinds
  heads = mixer.heads or cfg.width // mixer.key_size
  return dict(
    architectures=["DeltaNetForCausalLM"],
    model_type="delta_net",
    attn=None,
    attn_mode="chunk",
    vocab_size=cfg.vocab,
    hidden_size=cfg.width,
    num_hidden_layers=cfg.depth,
    num_heads=heads,
    expand_k=heads * mixer.key_size / cfg.width,
    expand_v=heads * mixer.value_size / cfg.width,
    use_beta=True,
    use_gate=mixer.output_gate,
    use_short_conv=mixer.conv > 0,
    conv_size=mixer.conv or 4,
    use_output_norm=True,
    qk_norm={ours: theirs for theirs, ours in _NORMS.items()}[mixer.norm],
    qk_activation=mixer.activation,
    allow_neg_eigval=mixer.negative_eigenvalues,
    hidden_act="swish",
    hidden_ratio=cfg.mlp_ratio,
    intermediate_size=cfg.mlp_width,
    norm_eps=cfg.norm_eps,
    tie_word_embeddings=cfg.tied,
    initializer_range=cfg.init_std,
    dtype=cfg.dtype,
  )
