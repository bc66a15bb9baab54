"""Mixers with a matrix state S [dk dv] per head: state, FLOPs, and the call of their operator."""

import jax.numpy as jnp

from deltanet_jax.mixers.base import Mixer
from deltanet_jax.mixers.layers import QKV
from deltanet_jax.ops import (
  delta_rule,
  delta_rule_step,
  dplr,
  layer_state,
  linear_attention,
  linear_attention_step,
)
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.epilogue import Activation, Epilogue
from deltanet_jax.sharding import locally

# Logical axes of [B L H d], a state [B H dk dv] and [B L] inside the operator.
_TOKENS = ("batch", None, "mixing_heads", None)
# A single key head, shared by all value heads, is replicated.
_SHARED = ("batch", None, None, None)
_STATE = ("batch", "mixing_heads", None, None)
_SEGMENTS = ("batch", None)


def head_sizes(cfg, width: int) -> tuple[int, int, int]:
  """Return (heads, dk, dv) from the config fields heads, expand_k and expand_v."""
  return cfg.heads, int(width * cfg.expand_k) // cfg.heads, int(width * cfg.expand_v) // cfg.heads


class MatrixStateMixer(Mixer):
  """Mixer with attributes heads, key_size, value_size and `qkv: QKV`.

  Its decoding state is S and the convolution states.
  """

  def init_state(self, batch, max_length, dtype):
    S = jnp.zeros((batch, self.heads, self.key_size, self.value_size), accum_dtype(dtype))
    return dict(S=S, **self.qkv.init_state(batch, dtype))

  def recurrent_state(self):
    return self.heads * self.key_size * self.value_size

  def flops(self, length):
    """FLOPs of the chunkwise form: scores, outputs and state."""
    dk, dv, C = self.key_size, self.value_size, min(self.cfg.chunk or 64, length)
    return 2 * self.heads * (C * dk + C * dv + 2 * dk * dv + self.correction_flops(C))

  def correction_flops(self, C: int) -> float:
    """Multiply-adds of the delta-rule correction per token and head; 0 in linear attention."""
    return 0.0


class DeltaRuleMixer(MatrixStateMixer):
  """Delta-rule mixer; its config has chunk, implementation and negative_eigenvalues."""

  operator = "delta_rule"
  efficient_form = "chunkwise, WY"
  kernels = "Pallas on GPU, TPU"
  in_place = ("S",)

  def correction_flops(self, C):
    # K K^T, the inverse (C^3 / 3 per chunk), X times values, and K S.
    dk, dv = self.key_size, self.value_size
    return C * dk + C * C / 3 + C * dv + dk * dv

  def run(self, q, k, v, beta, g, segment_ids, state):
    """Return (o, S), starting from state["S"] or from zero."""
    cfg = self.cfg
    beta = 2 * beta if cfg.negative_eigenvalues else beta
    options = dict(scale=self.key_size**-0.5, implementation=cfg.implementation)
    if state is not None and q.shape[1] == 1:
      # Decoding has its own kernels, which are not differentiable.
      token = (x[:, 0] for x in (q, k, v, beta))
      g_t = None if g is None else g[:, 0]
      o, S = delta_rule_step(*token, state["S"], g_t, **options)
      return o[:, None], S

    def rule(q, k, v, beta, g, S0, segment_ids):
      return delta_rule(
        q, k, v, beta, g=g, S0=S0, segment_ids=segment_ids, chunk=cfg.chunk, **options
      )

    S0 = None if state is None else layer_state.read(state["S"])
    gate = _TOKENS[: 3 if g is None else g.ndim]
    names = (*(_TOKENS,) * 3, _TOKENS[:3], gate, _STATE, _SEGMENTS)
    o, S = locally(rule, (q, k, v, beta, g, S0, segment_ids), names, (_TOKENS, _STATE))
    return o, S if state is None else layer_state.write(state["S"], S)


def attend(q, k, v, S0, segment_ids, *, g=None, h=None, scale, chunk):
  """Decayed linear attention (o, S), sharded over batch and heads.

  Args:
    q, k: may have fewer heads than v, each shared by a group of value heads.
    g, h: log decay of keys (per head or per channel) and of values (per channel).
  """

  def run(q, k, v, g, h, S0, segment_ids):
    if q.shape[1] == 1 and S0 is not None:
      token = (x[:, 0] for x in (q, k, v))
      gates = (None if x is None else x[:, 0] for x in (g, h))
      o, S = linear_attention_step(*token, S0, *gates, scale=scale)
      return o[:, None], S
    options = dict(scale=scale, chunk=chunk)
    return linear_attention(q, k, v, g=g, h=h, S0=S0, segment_ids=segment_ids, **options)

  keys = _SHARED if q.shape[2] == 1 else _TOKENS
  gate = _TOKENS if g is None else _TOKENS[: g.ndim]
  names = (keys, keys, _TOKENS, gate, _TOKENS, _STATE, _SEGMENTS)
  return locally(run, (q, k, v, g, h, S0, segment_ids), names, (_TOKENS, _STATE))


class LinearAttentionMixer(MatrixStateMixer):
  """Mixer on (decayed) linear attention; its config has chunk."""

  operator = "linear_attention"
  efficient_form = "chunkwise"
  kernels = "Pallas on GPU, TPU"
  # Whether outputs are divided by q_t z_t, where z_t is the decayed sum of keys.
  normalized = False

  def build_qkv(self, cfg, width: int, activation: Activation, *, std: float, rngs):
    """Set heads, key_size, value_size and qkv from the config, as in `head_sizes`."""
    self.heads, self.key_size, self.value_size = H, dk, dv = head_sizes(cfg, width)
    epilogue = Epilogue(activation, size=dk), Epilogue(activation, size=dv)
    self.qkv = QKV(width, H * dk, H * dv, cfg.conv, std=std, rngs=rngs, epilogue=epilogue)

  def init_state(self, batch, max_length, dtype):
    state = super().init_state(batch, max_length, dtype)
    if self.normalized:
      state["z"] = jnp.zeros((batch, self.heads, self.key_size), accum_dtype(dtype))
    return state

  def flops(self, length):
    dk, C = self.key_size, min(self.cfg.chunk, length)
    # z is one more column of the values and of S.
    return super().flops(length) + self.normalized * 2 * self.heads * (C + 2 * dk)

  def run(self, q, k, v, g, segment_ids, state, *, h=None, scale=None):
    """Return (o, S), starting from state["S"] or from zero; the default scale is dk^-1/2."""
    S0 = None if state is None else state["S"]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(q, k, v, S0, segment_ids, g=g, h=h, scale=scale, chunk=self.cfg.chunk)

  def run_normalized(self, q, k, v, g, segment_ids, state, *, scale=None):
    """Return (scale q_t S_t, scale q_t z_t, new state with S and z, or None)."""
    # A value of 1 makes z one more column of S: one pass computes both.
    v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
    if state is not None:
      state = dict(S=jnp.concatenate([state["S"], state["z"][..., None]], axis=-1))
    o, S = self.run(q, k, v, g, segment_ids, state, scale=scale)
    o = o.astype(accum_dtype(o.dtype))
    return o[..., :-1], o[..., -1:], None if state is None else dict(S=S[..., :-1], z=S[..., -1])


class DPLRMixer(MatrixStateMixer):
  """Diagonal-plus-low-rank (DPLR) mixer; its config has chunk and implementation."""

  operator = "dplr"
  efficient_form = "chunkwise, UT"

  def correction_flops(self, C):
    # Three more score matrices, the inverse and its matmuls to W and U, A K^T V, B^T R, W S, and
    # the contribution of B to the output.
    dk, dv = self.key_size, self.value_size
    return 4 * C * dk + 3 * C * dv + 2 * dk * dv + C * C / 3

  def run(self, q, k, v, a, b, g, segment_ids, state, *, scale):
    """Return (o, S), starting from state["S"] or from zero; g is a per-channel log decay."""

    def rule(q, k, v, a, b, g, S0, segment_ids):
      form = "recurrent" if q.shape[1] == 1 else self.cfg.implementation
      options = dict(scale=scale, chunk=self.cfg.chunk, implementation=form)
      return dplr(q, k, v, a, b, g=g, S0=S0, segment_ids=segment_ids, **options)

    S0 = None if state is None else state["S"]
    names = (*(_TOKENS,) * 6, _STATE, _SEGMENTS)
    return locally(rule, (q, k, v, a, b, g, S0, segment_ids), names, (_TOKENS, _STATE))
