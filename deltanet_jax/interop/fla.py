"""Load and save flash-linear-attention (FLA) checkpoints: safetensors and config.json.

Supports DeltaNet and Gated DeltaNet, and hybrids of either with softmax attention. Three
parts: parameters (`load_fla`, `save_fla`), options of single layers to and from mixer configs, and
config.json to and from `ModelConfig` (`from_fla`, `to_fla`).
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from deltanet_jax.config import MixerConfig, ModelConfig
from deltanet_jax.files import as_path, new_folder
from deltanet_jax.interop.checkpoint_files import (
  checkpoint_folder,
  read_config,
  read_tensor,
  tensor_files,
)
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNetConfig
from deltanet_jax.models import LM
from deltanet_jax.models.build import abstract

# Public names of a layer's parameters, by their path in a block.
_LAYER = {
  ("mixer_norm", "scale"): "attn_norm.weight",
  ("mixer", "qkv", "q", "kernel"): "attn.q_proj.weight",
  ("mixer", "qkv", "k", "kernel"): "attn.k_proj.weight",
  ("mixer", "qkv", "v", "kernel"): "attn.v_proj.weight",
  ("mixer", "qkv", "q_conv", "kernel"): "attn.q_conv1d.weight",
  ("mixer", "qkv", "k_conv", "kernel"): "attn.k_conv1d.weight",
  ("mixer", "qkv", "v_conv", "kernel"): "attn.v_conv1d.weight",
  ("mixer", "beta", "kernel"): "attn.b_proj.weight",
  ("mixer", "decay", "kernel"): "attn.a_proj.weight",
  ("mixer", "A_log"): "attn.A_log",
  ("mixer", "dt_bias"): "attn.dt_bias",
  ("mixer", "output", "gate", "kernel"): "attn.g_proj.weight",
  ("mixer", "output", "norm", "scale"): "attn.o_norm.weight",
  ("mixer", "output", "out", "kernel"): "attn.o_proj.weight",
  # Attention.
  ("mixer", "q", "kernel"): "attn.q_proj.weight",
  ("mixer", "k", "kernel"): "attn.k_proj.weight",
  ("mixer", "v", "kernel"): "attn.v_proj.weight",
  ("mixer", "out", "kernel"): "attn.o_proj.weight",
  ("mlp_norm", "scale"): "mlp_norm.weight",
  ("mlp", "gate", "kernel"): "mlp.gate_proj.weight",
  ("mlp", "up", "kernel"): "mlp.up_proj.weight",
  ("mlp", "down", "kernel"): "mlp.down_proj.weight",
}
_TOP = {
  ("embedding",): "model.embeddings.weight",
  ("norm", "scale"): "model.norm.weight",
  ("head", "kernel"): "lm_head.weight",
}


def load_fla(checkpoint: str | pathlib.Path, dtype: str | None = None) -> LM:
  """Load a public checkpoint as a model, with float32 parameters.

  Args:
    checkpoint: A folder, or owner/name of a repository on the Hugging Face hub.
    dtype: Computation dtype; None uses the one in config.json.
  """
  folder = checkpoint_folder(checkpoint)
  cfg = from_fla(read_config(folder))
  if dtype is not None:
    cfg.dtype = dtype
    cfg.validate()
  model = abstract(cfg)
  files = tensor_files(folder)
  weights = list(nnx.to_flat_state(nnx.state(model, nnx.Param)))
  names = [_names(model, path) for path, _ in weights]
  _same_names({name for layers in names for name in layers}, set(files), folder)
  # One parameter at a time: peak memory is the model plus one parameter.
  loaded = [(path, w.replace(_join(n, w.shape, files))) for n, (path, w) in zip(names, weights)]
  # Updates by path, so that the order of the flat state does not matter.
  nnx.update(model, nnx.from_flat_state(loaded))
  return model


def save_fla(
  model: LM,
  folder: str | pathlib.Path,
  dtype: Literal["float32", "bfloat16"] | None = None,
  extra_files: Mapping[str, bytes] | None = None,
):
  """Save config.json and model.safetensors to a new folder; `load_fla` restores the same model.

  Args:
    model: The model.
    folder: New or empty folder.
    dtype: Of the tensors. None uses bfloat16 if the model computes in it and this rounds no
      parameter, else float32.
    extra_files: Contents of further files by name, such as a tokenizer's (`Tokenizer.files`).

  Raises:
    ValueError: The format cannot represent the model; the message gives the reason.
  """
  options = to_fla(model.cfg)
  if dtype not in (None, "float32", "bfloat16"):
    raise ValueError(f"dtype is {dtype!r}, expected 'float32' or 'bfloat16'.")
  tensors = fla_tensors(model)
  if dtype is None:
    rounded = lambda x: x.astype(ml_dtypes.bfloat16).astype(x.dtype)
    exact = all(np.array_equal(rounded(x), x) for x in tensors.values())
    dtype = "bfloat16" if model.cfg.dtype == "bfloat16" and exact else "float32"
  kind = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
  tensors = {name: np.ascontiguousarray(x.astype(kind)) for name, x in tensors.items()}
  with new_folder(as_path(folder), last="config.json") as new:
    try:
      safetensors.numpy.save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    except safetensors.SafetensorError as e:
      raise OSError(f"{folder} cannot be written ({e}): choose a writable folder.") from e
    for name, content in (extra_files or {}).items():
      (new / name).write_bytes(content)
    config = new / "config.json"
    config.write_text(json.dumps(options, indent=2, sort_keys=True) + "\n")
    # safetensors creates its file readable only by its owner.
    (new / "model.safetensors").chmod(config.stat().st_mode)


def fla_tensors(model: LM) -> dict[str, np.ndarray]:
  """Return the parameters of a model (or its gradient) with their public names and shapes."""
  tensors = {}
  for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    value = np.asarray(weight[...])
    layers = value if path[0] == "stacks" else [value]
    names = _names(model, path)
    tensors |= {name: _public(name, layer) for name, layer in zip(names, layers, strict=True)}
  return tensors


def _names(model, path):
  """Return the public names of one parameter; one per layer if it is stacked."""
  if path[0] != "stacks":
    return [_TOP[path]]
  _, stack, _, _, block, *rest = path  # stacks.0.unit.blocks.0.<path in the block>
  *before, own = list(model.stacks)[: stack + 1]
  first = sum(s.times * len(s.names) for s in before) + block
  layers = range(first, first + own.times * len(own.names), len(own.names))
  return [f"model.layers.{i}.{_LAYER[tuple(rest)]}" for i in layers]


def _public(name, x):
  """Return one layer's parameter in its public shape, as a view."""
  if name.endswith("conv1d.weight"):
    return x.T[:, None, :]
  return x if x.ndim < 2 or name == "model.embeddings.weight" else x.T


def _join(names, shape, files):
  """Read a parameter, stacked over layers, from the files."""
  joined = np.empty(shape, np.float32)
  # Views in the public shape; writing to them fills `joined`.
  views = [_public(names[0], joined)] if names[0] in _TOP.values() else map(_public, names, joined)
  for name, view in zip(names, views, strict=True):
    view[...] = read_tensor(files[name], name, view.shape)
  # `jnp.asarray` would copy twice. Blocking limits the memory to one parameter in flight.
  return jax.block_until_ready(jax.device_put(joined))


def _same_names(expected, found, folder):
  if missing := sorted(expected - found):
    raise ValueError(f"{folder} lacks {len(missing)} tensors, e.g. {missing[:3]}.")
  if extra := sorted(found - expected):
    raise ValueError(
      f"{folder} has {len(extra)} tensors that its config.json does not describe, e.g. {extra[:3]}."
    )


_NORMS = {"l2": "l2", "sum": "l1"}
_ACTIVATIONS = ("silu", "relu", "elu", "identity")


@dataclasses.dataclass(frozen=True)
class _Family:
  """The mixer of one `model_type`, in layers without attention."""

  config: type[MixerConfig]
  architecture: str
  options: dict  # options that determine the mixer, with the defaults for older files
  fixed: dict  # options and their supported values
  ignored: set  # options without effect on the public layer
  read: Callable[[dict], MixerConfig]
  write: Callable[[MixerConfig, int], dict]  # of the mixer and the model's width


def _read_deltanet(o):
  for name, known in (("qk_norm", tuple(_NORMS)), ("qk_activation", _ACTIVATIONS)):
    if o[name] not in known:
      raise ValueError(f"config.json has {name} {o[name]!r}, expected one of {known}.")
  return DeltaNetConfig(
    heads=o["num_heads"],
    key_size=_head_size(o, "expand_k"),
    value_size=_head_size(o, "expand_v"),
    activation=o["qk_activation"],
    norm=_NORMS[o["qk_norm"]],
    conv=o["conv_size"] if o["use_short_conv"] else 0,
    negative_eigenvalues=o["allow_neg_eigval"],
    output_gate=o["use_gate"],
  )


def _head_size(o, expand):
  size = int(o["hidden_size"] * o[expand])
  if size % o["num_heads"]:
    raise ValueError(
      f"config.json has {expand} {o[expand]} and hidden_size {o['hidden_size']}, which do not"
      f" divide into {o['num_heads']} heads."
    )
  return size // o["num_heads"]


def _write_deltanet(mixer, width):
  heads = mixer.heads or width // mixer.key_size
  return _write_shared(mixer) | dict(
    num_heads=heads,
    expand_k=_ratio(heads * mixer.key_size, width),
    expand_v=_ratio(heads * mixer.value_size, width),
    use_beta=True,
    use_output_norm=True,
    qk_norm={ours: theirs for theirs, ours in _NORMS.items()}[mixer.norm],
    qk_activation=mixer.activation,
  )


def _read_gated_deltanet(o):
  heads, size = o["num_heads"], o["head_dim"]
  if o["num_v_heads"] not in (None, heads):
    raise ValueError(
      f"config.json has num_v_heads = {o['num_v_heads']!r}, expected num_heads = {heads}: other"
      " values are unsupported."
    )
  value_size = int(size * o["expand_v"])
  if not math.isclose(value_size, size * o["expand_v"], rel_tol=1e-5):
    raise ValueError(
      f"config.json has expand_v {o['expand_v']} and head_dim {size}, expected an integer product."
    )
  return GatedDeltaNetConfig(
    heads=heads,
    key_size=size,
    value_size=value_size,
    conv=o["conv_size"] if o["use_short_conv"] else 0,
    negative_eigenvalues=o["allow_neg_eigval"],
    output_gate=o["use_gate"],
  )


def _write_gated_deltanet(mixer, width):
  return _write_shared(mixer) | dict(
    num_heads=mixer.heads or max(3 * width // (4 * mixer.key_size), 1),
    num_v_heads=None,
    head_dim=mixer.key_size,
    expand_v=_ratio(mixer.value_size, mixer.key_size),
  )


def _write_shared(mixer):
  return dict(
    use_gate=mixer.output_gate,
    use_short_conv=mixer.conv > 0,
    conv_size=mixer.conv or 4,
    allow_neg_eigval=mixer.negative_eigenvalues,
  )


def _ratio(part, total):
  """Return x with int(total * x) == part, as readers compute it; part / total may round below."""
  x = part / total
  return x if int(total * x) == part else math.nextafter(x, math.inf)


_SHARED = dict(num_heads=None, use_short_conv=True, conv_size=4, allow_neg_eigval=False)
_FAMILIES = {
  "delta_net": _Family(
    config=DeltaNetConfig,
    architecture="DeltaNetForCausalLM",
    options=_SHARED
    | dict(expand_k=1.0, expand_v=1.0, use_gate=False, qk_norm="l2", qk_activation="silu"),
    fixed=dict(use_beta=(True,)),
    ignored=set(),
    read=_read_deltanet,
    write=_write_deltanet,
  ),
  "gated_deltanet": _Family(
    config=GatedDeltaNetConfig,
    architecture="GatedDeltaNetForCausalLM",
    options=_SHARED | dict(head_dim=256, num_v_heads=None, expand_v=2.0, use_gate=True),
    # Present in files derived from DeltaNet configs; the layer supports no other values.
    fixed=dict(use_beta=(True,), qk_norm=("l2",), qk_activation=("silu",)),
    ignored={"expand_k"},
    read=_read_gated_deltanet,
    write=_write_gated_deltanet,
  ),
}

_ATTENTION = {
  "layers",
  "num_heads",
  "num_kv_heads",
  "window_size",
  "rope_theta",
  "qkv_bias",
  "qk_norm",
}


def _is_size(value: object) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read_attention(attn: object, width: int, depth: int) -> dict[int, AttentionConfig]:
  """Parse `attn` (a group of layers, a list of groups, or None) to a config per layer."""
  groups = [attn] if isinstance(attn, dict) else [] if attn is None else attn
  if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
    raise ValueError(
      f"config.json has attn = {attn!r}, expected an object, a list of objects or null."
    )
  layers = {}
  for group in groups:
    missing = [name for name in ("layers", "num_heads") if group.get(name) is None]
    if missing:
      raise ValueError(f"config.json has attn without {missing}.")
    if unknown := sorted(set(group) - _ATTENTION):
      raise ValueError(f"config.json has attn with unsupported options {unknown}.")
    for name in ("qkv_bias", "qk_norm"):
      if group.get(name):
        raise ValueError(
          f"config.json has attn with {name} = {group[name]!r}, expected False: it is unsupported."
        )
    heads = group["num_heads"]
    if not _is_size(heads) or width % heads:
      raise ValueError(
        f"config.json has attn with num_heads = {heads!r}, expected a divisor of {width}."
      )
    theta = group.get("rope_theta", 10000.0)
    if not isinstance(theta, int | float):
      raise ValueError(f"config.json has attn with rope_theta = {theta!r}, expected a number.")
    mixer = AttentionConfig(
      heads=heads,
      head_size=width // heads,
      kv_heads=group.get("num_kv_heads") or heads,
      window=group.get("window_size"),
      rope_base=float(theta),
    )
    for i in group["layers"]:
      if i not in range(depth):
        raise ValueError(f"config.json has attn in layer {i!r}, expected one of 0 to {depth - 1}.")
      if i in layers:
        raise ValueError(f"config.json has attn in layer {i} twice.")
      layers[i] = mixer
  return layers


def _write_attention(layers: dict[int, AttentionConfig], width: int) -> dict | list | None:
  """Return the option `attn` for attention layers: None, one group, or a list of groups."""
  groups = []
  for mixer in dict.fromkeys(layers.values()):
    heads = mixer.heads or max(width // mixer.head_size, 1)
    if heads * mixer.head_size != width:
      raise ValueError(
        f"attention has {heads} heads of size {mixer.head_size}; the format supports only"
        f" heads * head_size = width = {width}."
      )
    if mixer.bias or mixer.rope_base is None:
      raise ValueError("attention has biases or no RoPE; the format supports neither.")
    groups.append(
      dict(
        layers=[i for i, other in layers.items() if other == mixer],
        num_heads=heads,
        num_kv_heads=mixer.kv_heads or heads,
        qkv_bias=False,
        window_size=mixer.window,
        rope_theta=mixer.rope_base,
      )
    )
  return groups if len(groups) > 1 else groups[0] if groups else None


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
  attention = _read_attention(o["attn"], width, depth)
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


def _checked(options: dict) -> tuple[dict, _Family, str]:
  """Validate options; return those that determine the model, the family and the dtype."""
  kind = options.get("model_type")
  if kind is None and "config" in options:
    raise ValueError(
      "config.json belongs to a run or an export of this library, not to a public checkpoint: pass"
      " its folder as --workdir, or to load_trained."
    )
  if kind not in _FAMILIES:
    raise ValueError(f"config.json has model_type = {kind!r}, expected one of {list(_FAMILIES)}.")
  family = _FAMILIES[kind]
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
    if not _is_size(options[name]):
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
  kinds = {family.config: kind for kind, family in _FAMILIES.items()}
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
  family = _FAMILIES[kind]
  return family.write(own[0], cfg.width) | dict(
    architectures=[family.architecture],
    model_type=kind,
    attn=_write_attention(attention, cfg.width),
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
