"""One decoding step on TPU: the state is read once, updated in place and written once."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.platform import require_platform
from pallas_kernels.delta_rule.checks import check_inputs

F32 = jnp.float32
BLOCK_BYTES = 2**20  # state per program: long transfers, four buffers in VMEM
MAX_UNROLLED = 16  # heads per program, over all its sequences


def _choose_block(B, H, Hv, dk, dv):
  """Return the sequences and value heads per program."""
  ratio = Hv // H
  limit = min(MAX_UNROLLED, max(1, BLOCK_BYTES // (4 * dk * dv)))
  heads = max(
    G for G in range(1, Hv + 1) if Hv % G == 0 and limit >= G and not (G % ratio and ratio % G)
  )
  sequences = max(n for n in range(1, B + 1) if B % n == 0 and (n == 1 or n * heads <= limit))
  return (sequences, heads) if heads == Hv else (1, heads)


def _step_body(
  layer_ref, q_ref, k_ref, v_ref, rows_ref, *refs, ratio, scale, delta_rule, per_channel
):
  # q, k [n, key_heads, dk]; v, o [n, heads, dv]; rows [n, 2, heads] of beta, e^g; e^g of
  # per-channel gates [n, heads, dk]; S [n, heads, dk, dv] of the layer chosen by the block specs
  del layer_ref
  gate_ref = refs[0] if per_channel else None
  S_ref, o_ref, S_out_ref = refs[per_channel:]
  sequences, heads = v_ref.shape[:2]
  for b in range(sequences):
    Q, K = q_ref[b].astype(F32), k_ref[b].astype(F32)
    q_cols, k_cols = Q.T, K.T
    gates = gate_ref[b].T if per_channel else None
    qk = jnp.sum(Q * K, axis=1, keepdims=True)
    V, rows = v_ref[b].astype(F32), rows_ref[b]
    out = []
    for h in range(heads):
      j = h // ratio if q_ref.shape[1] > 1 else 0
      S = S_ref[b, h] * (gates[:, h : h + 1] if per_channel else rows[1:, h : h + 1])
      k_t, r_t = k_cols[:, j : j + 1], V[h : h + 1]
      if delta_rule:
        r_t = (r_t - jnp.sum(k_t * S, axis=0, keepdims=True)) * rows[:1, h : h + 1]
      S_out_ref[b, h] = S + k_t * r_t
      # q S_new = q S + (q k) r, with the state already in registers.
      qS = jnp.sum(q_cols[:, j : j + 1] * S, axis=0, keepdims=True)
      out.append((qS + qk[j : j + 1] * r_t) * scale)
    o_ref[b] = jnp.concatenate(out, axis=0).astype(o_ref.dtype)


def delta_rule_step_tpu(
  q_t, k_t, v_t, beta_t, S, g_t=None, *, layer=None, scale=1.0, interpret=False
):
  """Apply the delta rule to one token and return (o_t, S).

  o_t = scale q_t S and S = S- + k_t beta_t (v_t - k_t S-) with S- = e^{g_t} S. Linear attention if
  beta_t is None: S = S- + k_t v_t. Computed in float32 on the vector unit, without rounding to
  bfloat16. S is updated in place if the caller donates it.

  Args:
    q_t, k_t: [B, H, dk].
    v_t: [B, Hv, dv]; value head j uses key head j // (Hv // H).
    beta_t: [B, Hv] or None.
    g_t: per head [B, Hv] or per channel [B, Hv, dk], or None.
    S: [B, Hv, dk, dv] float32, or with a `layer` index [layers, B, Hv, dk, dv], of which only that
      layer is read and written.

  Returns:
    o_t [B, Hv, dv] in v_t's dtype and S.
  """
  B, H, dk = q_t.shape
  Hv, dv = v_t.shape[1:]
  check_inputs(q_t, k_t, v_t, beta_t, g_t, S, channels=True)
  delta_rule, per_channel = beta_t is not None, g_t is not None and g_t.ndim == 3
  name = "delta_rule_step" if delta_rule else "linear_attention_step"
  q_t = q_t if interpret else require_platform(q_t, "tpu", f"{name}_tpu")
  n, G = _choose_block(B, H, Hv, dk, dv)
  ratio, J = Hv // H, Hv // G
  key_heads = max(G // ratio, 1)
  share = max(ratio // G, 1)  # programs that read one key head
  ones = jnp.ones((B, Hv), F32)
  decay = ones if g_t is None else jnp.exp(g_t.astype(F32))
  rows = [ones if beta_t is None else beta_t.astype(F32), ones if per_channel else decay]
  rows = jnp.stack([x.reshape(B, J, G) for x in rows], axis=2)
  # full_like: a Python int would be 64-bit with jax_enable_x64.
  key = lambda j: lax.div(j, lax.full_like(j, share))
  key_spec = pl.BlockSpec((n, None, key_heads, dk), lambda b, j, _: (b, key(j), 0, 0))
  value_spec = pl.BlockSpec((n, None, G, dv), lambda b, j, _: (b, j, 0, 0))
  state_spec = pl.BlockSpec((None, n, G, dk, dv), lambda b, j, layer: (layer[0], b, j, 0, 0))
  stack = S[None] if layer is None else S
  layer_index = jnp.zeros((1,), jnp.int32) if layer is None else layer.astype(jnp.int32).reshape(1)
  keys = lambda x: x.reshape(B, H // key_heads, key_heads, dk)
  gate_spec = pl.BlockSpec((n, None, G, dk), lambda b, j, _: (b, j, 0, 0))
  gates = [decay.reshape(B, J, G, dk)] if per_channel else []
  o_t, S = pl.pallas_call(
    functools.partial(
      _step_body, ratio=ratio, scale=scale, delta_rule=delta_rule, per_channel=per_channel
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(B // n, J),
      in_specs=[
        *[key_spec, key_spec, value_spec],
        pl.BlockSpec((n, None, 2, G), lambda b, j, _: (b, j, 0, 0)),
        *[gate_spec] * per_channel,
        state_spec,
      ],
      out_specs=[value_spec, state_spec],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((B, J, G, dv), v_t.dtype),
      jax.ShapeDtypeStruct(stack.shape, F32),
    ],
    input_output_aliases={5 + per_channel: 1},
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    interpret=interpret,
    name=name,
  )(layer_index, keys(q_t), keys(k_t), v_t.reshape(B, J, G, dv), rows, *gates, stack.astype(F32))
  return o_t.reshape(B, Hv, dv), S[0] if layer is None else S


def linear_attention_step_tpu(q_t, k_t, v_t, S, g_t=None, **options):
  """Apply linear attention to one token: `delta_rule_step_tpu` without the correction."""
  return delta_rule_step_tpu(q_t, k_t, v_t, None, S, g_t, **options)
