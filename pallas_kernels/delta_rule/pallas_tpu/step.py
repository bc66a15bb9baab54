"""Delta rule on TPU, one token: the state is read once, updated in place and written once."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.platform import require_platform
from pallas_kernels.delta_rule.checks import check_inputs

F32 = jnp.float32
BLOCK_BYTES = 2**20  # of state per program: long enough transfers, four buffers in VMEM
MAX_UNROLLED = 16  # heads of a program, over its sequences


def _choose_block(B, H, Hv, dk, dv):
  """Sequences and value heads per program."""
  ratio = Hv // H
  limit = min(MAX_UNROLLED, max(1, BLOCK_BYTES // (4 * dk * dv)))
  heads = max(
    G for G in range(1, Hv + 1) if Hv % G == 0 and limit >= G and not (G % ratio and ratio % G)
  )
  sequences = max(n for n in range(1, B + 1) if B % n == 0 and (n == 1 or n * heads <= limit))
  return (sequences, heads) if heads == Hv else (1, heads)


def _step_body(layer_ref, q_ref, k_ref, v_ref, rows_ref, *refs, ratio, scale, delta_rule, channels):
  # q, k [n, key_heads, dk]; v, o [n, heads, dv]; rows [n, 2, heads] of beta, e^g; with channels
  # their e^g [n, heads, dk]; S [n, heads, dk, dv] of the layer that the specs chose
  del layer_ref
  gate_ref = refs[0] if channels else None
  S_ref, o_ref, S_out_ref = refs[channels:]
  sequences, heads = v_ref.shape[:2]
  for b in range(sequences):
    Q, K = q_ref[b].astype(F32), k_ref[b].astype(F32)
    q_cols, k_cols = Q.T, K.T
    gates = gate_ref[b].T if channels else None
    qk = jnp.sum(Q * K, axis=1, keepdims=True)
    V, rows = v_ref[b].astype(F32), rows_ref[b]
    out = []
    for h in range(heads):
      j = h // ratio if q_ref.shape[1] > 1 else 0
      S = S_ref[b, h] * (gates[:, h : h + 1] if channels else rows[1:, h : h + 1])
      k_t, r_t = k_cols[:, j : j + 1], V[h : h + 1]
      if delta_rule:
        r_t = (r_t - jnp.sum(k_t * S, axis=0, keepdims=True)) * rows[:1, h : h + 1]
      S_out_ref[b, h] = S + k_t * r_t
      # q S_new from the state already in registers.
      qS = jnp.sum(q_cols[:, j : j + 1] * S, axis=0, keepdims=True)
      out.append((qS + qk[j : j + 1] * r_t) * scale)
    o_ref[b] = jnp.concatenate(out, axis=0).astype(o_ref.dtype)


def delta_rule_step_tpu(
  q_t, k_t, v_t, beta_t, S, g_t=None, *, layer=None, scale=1.0, interpret=False
):
  """o_t = scale q_t S and S = S- + k_t beta_t (v_t - k_t S-), S- = e^{g_t} S, for one token.

  Of linear attention where beta_t is None: S = S- + k_t v_t. Sums in float32 on the vector unit, so
  no product is rounded to bfloat16. S is overwritten where the caller donates it.

  Args:
    q_t, k_t: [B, H, dk].
    v_t: [B, Hv, dv]; value head j uses key head j // (Hv // H).
    beta_t, g_t: [B, Hv], of key channels g_t [B, Hv, dk]; either may be None.
    S: [B, Hv, dk, dv] float32, or with a `layer` [layers, B, Hv, dk, dv]: that one is read and
      overwritten.

  Returns:
    o_t [B, Hv, dv] in v_t's dtype and S.
  """
  B, H, dk = q_t.shape
  Hv, dv = v_t.shape[1:]
  check_inputs(q_t, k_t, v_t, beta_t, g_t, S, channels=True)
  delta_rule, channels = beta_t is not None, g_t is not None and g_t.ndim == 3
  name = "delta_rule_step" if delta_rule else "linear_attention_step"
  q_t = q_t if interpret else require_platform(q_t, "tpu", f"{name}_tpu")
  n, G = _choose_block(B, H, Hv, dk, dv)
  ratio, J = Hv // H, Hv // G
  key_heads = max(G // ratio, 1)
  share = max(ratio // G, 1)  # programs that read one key head
  ones = jnp.ones((B, Hv), F32)
  decay = ones if g_t is None else jnp.exp(g_t.astype(F32))
  rows = [ones if beta_t is None else beta_t.astype(F32), ones if channels else decay]
  rows = jnp.stack([x.reshape(B, J, G) for x in rows], axis=2)
  # A plain `share` would be a 64-bit number where jax_enable_x64 is set.
  key = lambda j: lax.div(j, lax.full_like(j, share))
  key_spec = pl.BlockSpec((n, None, key_heads, dk), lambda b, j, _: (b, key(j), 0, 0))
  value_spec = pl.BlockSpec((n, None, G, dv), lambda b, j, _: (b, j, 0, 0))
  state_spec = pl.BlockSpec((None, n, G, dk, dv), lambda b, j, layer: (layer[0], b, j, 0, 0))
  stack = S[None] if layer is None else S
  number = jnp.zeros((1,), jnp.int32) if layer is None else layer.astype(jnp.int32).reshape(1)
  keys = lambda x: x.reshape(B, H // key_heads, key_heads, dk)
  gate_spec = pl.BlockSpec((n, None, G, dk), lambda b, j, _: (b, j, 0, 0))
  gates = [decay.reshape(B, J, G, dk)] if channels else []
  o_t, S = pl.pallas_call(
    functools.partial(
      _step_body, ratio=ratio, scale=scale, delta_rule=delta_rule, channels=channels
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(B // n, J),
      in_specs=[
        *[key_spec, key_spec, value_spec],
        pl.BlockSpec((n, None, 2, G), lambda b, j, _: (b, j, 0, 0)),
        *[gate_spec] * channels,
        state_spec,
      ],
      out_specs=[value_spec, state_spec],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((B, J, G, dv), v_t.dtype),
      jax.ShapeDtypeStruct(stack.shape, F32),
    ],
    input_output_aliases={5 + channels: 1},
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    interpret=interpret,
    name=name,
  )(number, keys(q_t), keys(k_t), v_t.reshape(B, J, G, dv), rows, *gates, stack.astype(F32))
  return o_t.reshape(B, Hv, dv), S[0] if layer is None else S


def linear_attention_step_tpu(q_t, k_t, v_t, S, g_t=None, **options):
  """One token of linear attention: `delta_rule_step_tpu` that delta_rule nothing."""
  return delta_rule_step_tpu(q_t, k_t, v_t, None, S, g_t, **options)
