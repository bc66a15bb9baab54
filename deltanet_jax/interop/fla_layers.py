"""Convert layer options of public checkpoints to and from mixer configs."""

import dataclasses
import math
from collections.abc import Callable

from deltanet_jax.config import MixerConfig
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNetConfig

_NORMS = {"l2": "l2", "sum": "l1"}
_ACTIVATIONS = ("silu", "relu", "elu", "identity")


@dataclasses.dataclass(frozen=True)
class Family:
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
FAMILIES = {
  "delta_net": Family(
    config=DeltaNetConfig,
    architecture="DeltaNetForCausalLM",
    options=_SHARED
    | dict(expand_k=1.0, expand_v=1.0, use_gate=False, qk_norm="l2", qk_activation="silu"),
    fixed=dict(use_beta=(True,)),
    ignored=set(),
    read=_read_deltanet,
    write=_write_deltanet,
  ),
  "gated_deltanet": Family(
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


def is_size(value: object) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_attention(attn: object, width: int, depth: int) -> dict[int, AttentionConfig]:
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
    if not is_size(heads) or width % heads:
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


def write_attention(layers: dict[int, AttentionConfig], width: int) -> dict | list | None:
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
