"""Cases of `compare_transformers`: mixers with a counterpart in transformers, and weight names."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from deltanet_jax.config import MixerConfig
from deltanet_jax.mixers import Mixer, mixer_config

# Several chunks and an incomplete one in both libraries; transformers has chunks of 64.
B, L, D, CHUNK = 2, 150, 32, 32


@dataclasses.dataclass(frozen=True)
class LayerCase:
  """A mixer and the corresponding layer of transformers.

  Args:
    layer: its name in `compare_transformers_worker.LAYERS`.
    settings: arguments of its config, without the width.
    weights: converts our weights to its names and layout.
    eps: of norms.
    add: offsets of initial weights, by name, so that every part of the layer has an effect.
    missing: weights that it lacks; zero in ours, and their gradients are not compared.
  """

  config: MixerConfig
  layer: str
  settings: dict
  weights: Callable[[Mixer], dict[str, Array]]
  eps: float = 1e-6
  add: dict[str, float] = dataclasses.field(default_factory=dict)
  missing: tuple[str, ...] = ()


def _rows(*parts):
  """Kernels of linear layers or convolutions, concatenated in the torch layout (outputs first)."""
  return jnp.concatenate([part.kernel[...].T for part in parts])


def _filters(*convs):
  return _rows(*convs)[:, None]


def _mamba(m):
  return {
    "in_proj.weight": _rows(m.into),
    "conv1d.weight": _filters(m.conv),
    "conv1d.bias": m.conv.bias[...],
    "x_proj.weight": _rows(m.select),
    "dt_proj.weight": m.dt_kernel[...].T,
    "dt_proj.bias": m.dt_bias[...],
    "A_log": m.A_log[...],
    "D": m.D[...],
    "out_proj.weight": _rows(m.out),
  }


def _mamba2(m):
  return {
    "in_proj.weight": _rows(m.gate, m.value, m.BC, m.dt),
    "conv1d.weight": _filters(m.value_conv, m.BC_conv),
    "conv1d.bias": jnp.concatenate([m.value_conv.bias[...], m.BC_conv.bias[...]]),
    "dt_bias": m.dt_bias[...],
    "A_log": m.A_log[...],
    "D": m.D[...],
    "norm.weight": m.scale[...],
    "out_proj.weight": _rows(m.out),
  }


def _rwkv4(m):
  # Ours is the weight of the previous token, theirs that of the current token.
  current = lambda previous: (1 - previous[...])[None, None]
  return {
    "time_mix_key": current(m.k_share),
    "time_mix_value": current(m.v_share),
    "time_mix_receptance": current(m.r_share),
    "time_decay": m.decay[...],
    "time_first": m.bonus[...],
    "key.weight": _rows(m.k),
    "value.weight": _rows(m.v),
    "receptance.weight": _rows(m.r),
    "output.weight": _rows(m.out),
  }


def _mlstm(m):
  return {
    "q.weight": _rows(m.qkv.q),
    "k.weight": _rows(m.qkv.k),
    "v.weight": _rows(m.qkv.v),
    "ogate_preact.weight": _rows(m.gate),
    "igate_preact.weight": _rows(m.input),
    "igate_preact.bias": m.input_bias[...],
    "fgate_preact.weight": _rows(m.forget),
    "fgate_preact.bias": m.forget_bias[...],
    "multihead_norm.weight": m.norm.scale[...],
    "out_proj.weight": _rows(m.out),
  }


def _delta(m):
  return {
    "q_proj.weight": _rows(m.qkv.q),
    "k_proj.weight": _rows(m.qkv.k),
    "v_proj.weight": _rows(m.qkv.v),
    "conv1d.weight": _filters(m.qkv.q_conv, m.qkv.k_conv, m.qkv.v_conv),
    "b_proj.weight": _rows(m.beta),
    "o_norm.weight": m.output.norm.scale[...],
    "o_proj.weight": _rows(m.output.out),
  }


def _olmo(m):
  return _delta(m) | {
    "a_proj.weight": _rows(m.decay),
    "g_proj.weight": _rows(m.output.gate),
    "A_log": m.A_log[...],
    "dt_bias": m.dt_bias[...],
  }


def _qwen(m):
  # All projections of the first head, then those of the next.
  by_head = lambda *parts: jnp.concatenate(
    [_rows(part).reshape(m.heads, -1, D) for part in parts], axis=1
  ).reshape(-1, D)
  shared = _delta(m)
  return {
    "in_proj_qkvz.weight": by_head(m.qkv.q, m.qkv.k, m.qkv.v, m.output.gate),
    "in_proj_ba.weight": by_head(m.beta, m.decay),
    "conv1d.weight": shared["conv1d.weight"],
    "A_log": m.A_log[...],
    "dt_bias": m.dt_bias[...],
    "norm.weight": shared["o_norm.weight"],
    "out_proj.weight": shared["o_proj.weight"],
  }


def _kimi(m):
  return _delta(m) | {
    "forget_gate.f_a_proj.weight": _rows(m.decay.down),
    "forget_gate.f_b_proj.weight": _rows(m.decay.up),
    "forget_gate.dt_bias": m.dt_bias[...],
    "forget_gate.A_log": m.A_log[...][None, None, :, None],
    "g_a_proj.weight": _rows(m.output.gate.down),
    "g_b_proj.weight": _rows(m.output.gate.up),
  }


_HEADS = dict(
  linear_num_key_heads=2,
  linear_num_value_heads=2,
  linear_key_head_dim=8,
  linear_value_head_dim=12,
)
_DELTA = dict(heads=2, key_size=8, value_size=12, chunk=CHUNK)
_MAMBA2 = dict(head_size=16, state_size=8, chunk=CHUNK)

CASES = [
  LayerCase(
    mixer_config("mamba")(state_size=8, chunk=CHUNK),
    "MambaMixer",
    dict(state_size=8, num_hidden_layers=1),
    _mamba,
  ),
  LayerCase(
    mixer_config("mamba2")(**_MAMBA2),
    "Mamba2Mixer",
    dict(
      num_heads=4,
      head_dim=16,
      state_size=8,
      n_groups=1,
      chunk_size=64,
      layer_norm_epsilon=1e-6,
      num_hidden_layers=1,
    ),
    _mamba2,
  ),
  # The Mamba2 of transformers with a norm per group, as in the authors' implementation.
  LayerCase(
    mixer_config("mamba2")(groups=2, **_MAMBA2),
    "Zamba2MambaMixer",
    dict(
      n_mamba_heads=4,
      mamba_d_state=8,
      mamba_ngroups=2,
      chunk_size=64,
      time_step_min=0.0,
      num_attention_heads=2,
    ),
    _mamba2,
    eps=1e-5,
  ),
  LayerCase(
    mixer_config("rwkv4")(chunk=CHUNK), "RwkvSelfAttention", dict(num_hidden_layers=1), _rwkv4
  ),
  LayerCase(
    mixer_config("mlstm")(heads=2, chunk=CHUNK),
    "xLSTMLayer",
    dict(num_heads=2, num_hidden_layers=1, autocast_kernel_dtype="float32"),
    _mlstm,
    # With its initial input gate of almost 0, the normalizer would be 1 everywhere.
    add=dict(input_bias=10.0),
  ),
  LayerCase(
    mixer_config("gated_deltanet")(negative_eigenvalues=True, **_DELTA),
    "OlmoHybridGatedDeltaNet",
    dict(num_attention_heads=2, linear_allow_neg_eigval=True, **_HEADS),
    _olmo,
    eps=1e-5,
  ),
  LayerCase(
    mixer_config("gated_deltanet")(**_DELTA), "Qwen3NextGatedDeltaNet", dict(**_HEADS), _qwen
  ),
  LayerCase(
    mixer_config("kda")(heads=2, key_size=8, value_size=8, chunk=CHUNK),
    "KimiLinearDeltaAttention",
    dict(linear_head_dim=8, linear_num_heads=2),
    _kimi,
    eps=1e-5,
    missing=("output.gate.up.bias",),
  ),
]
