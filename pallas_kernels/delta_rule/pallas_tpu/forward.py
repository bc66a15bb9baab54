"""Forward kernel on TPU: reads q, k, v, beta, g and writes o and the final state.

For the delta rule, and for linear attention, which has no beta and no inverse (R = V).

Grid (batch, head group, chunk); the states of a group stay in VMEM over all chunks. All states are
processed stage by stage, so that the matmuls of one state hide the latency of another's.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.delta_rule.pallas_tpu.decay import load_decays, rows_to_columns, scaled
from pallas_kernels.delta_rule.pallas_tpu.inverse import Inverse, unit_lower_inverse
from pallas_kernels.delta_rule.pallas_tpu.matmul import F32, TN, matmul
from pallas_kernels.delta_rule.pallas_tpu.tiles import block_specs, compiler_params


def _body(*refs, tile, with_S0, save):
  # q, k [sequences, C, key_heads*dk]; v, o [sequences, C, heads*dv]; rows [rows, C];
  # S [sequences, heads, dk, dv]; X [sequences, heads, C, C]
  q_ref, k_ref, v_ref, *refs = refs
  rows_ref = refs.pop(0) if tile.row_count else None
  gate_ref = refs.pop(0) if tile.per_channel else None
  S0_ref = refs.pop(0) if with_S0 else None
  o_ref, S_ref, *saved_refs = refs

  @pl.when(pl.program_id(2) == 0)
  def _():
    S_ref[...] = S0_ref[...] if with_S0 else jnp.zeros_like(S_ref)

  states, dtype = range(tile.states), k_ref.dtype
  decays = load_decays(tile, rows_ref, gate_ref)
  Q = [q_ref[tile.key_slice(i)] for i in range(tile.key_count)]
  K = [k_ref[tile.key_slice(i)] for i in range(tile.key_count)]
  D = [decays.score_factors(u) for u in states]
  S = [S_ref[tile.state_index(u)] for u in states]
  S_in = [s.astype(dtype) for s in S]

  if tile.delta_rule:
    KK, errors = decays.key_scores(K)
    A = [decays.correction_matrix(u, KK[u], D[u]) for u in states]
    A_errors = [decays.correction_matrix(u, errors[u], D[u]) for u in states]
    # Before the inverse, whose substitution leaves the matrix units idle.
    KS = _read_state(tile, decays, K, S_in)
    X = unit_lower_inverse(A, tile.base, tile.inverse_precision)
    X = [x.astype(dtype) for x in X]
    inverses = [Inverse.refine(*x) for x in zip(X, A, A_errors)]
  QK = decays.query_scores(Q, K)
  P = [decays.lower(u, QK[u], D[u]).astype(dtype) for u in states]
  QS = _read_state(tile, decays, Q, S_in)
  if save:
    for u in states:
      saved_refs[0][tile.state_index(u)] = S_in[u]
      if tile.delta_rule:
        saved_refs[1][tile.state_index(u)] = X[u]

  start, end, total = zip(*[decays.carry_factors(u) for u in states])
  K_write = [K[tile.key_of(u)] for u in states]
  if tile.per_channel:
    # Already applied by `_read_state`, and applied to K_write below instead of to R.
    row_start = row_end = [None]
    S = scaled(S, rows_to_columns(total))
  else:
    row_start, row_end = start, end
    QS = scaled(QS, row_start)
    S = scaled(S, total)
  if tile.delta_rule:
    KS = scaled(KS, row_start)
    V = [v_ref[tile.value_slice(u)].astype(F32) for u in states]
    # Y, and R in the state update, have two bfloat16 parts: their rounding dominates the error.
    Y = [(V[u] - KS[u]) * decays.beta(u) for u in states]
    R, R_rest = zip(*[inverse.times(y) for inverse, y in zip(inverses, Y)])
  else:
    R, R_rest = [v_ref[tile.value_slice(u)] for u in states], [None] * tile.states
  R_out = [r.astype(dtype) for r in R]
  R_write, rest_write = R, R_rest
  if row_end[0] is not None:
    R_write = [r.astype(F32) * x for r, x in zip(R, row_end)]
  if not tile.delta_rule:
    R_write = [r.astype(dtype) for r in R_write]
  if R_rest[0] is not None:
    rest_write = scaled(R_rest, row_end)
  if tile.per_channel:
    K_write = [(k.astype(F32) * x).astype(dtype) for k, x in zip(K_write, end)]
  for u in states:
    O = QS[u] + matmul(P[u], R_out[u], residual=R_rest[u])
    O = O if tile.scale == 1.0 else O * tile.scale
    o_ref[tile.value_slice(u)] = O.astype(o_ref.dtype)
    update = matmul(K_write[u], R_write[u], TN, residual=rest_write[u])
    S_ref[tile.state_index(u)] = S[u] + update


def _read_state(tile, decays, X, S):
  """Return X S of every state, X queries or keys; with per-channel gates X is decayed before."""
  out = []
  for u in range(tile.states):
    x = X[tile.key_of(u)]
    if tile.per_channel:
      x = (x.astype(F32) * decays.gates[u].start).astype(x.dtype)
    out.append(matmul(x, S[u]))
  return out


def forward(q, k, v, rows, gate, S0, *, tile, save=False, interpret=False):
  """Return o, S and, if `save`, residuals of the backward pass.

  Args:
    q, k: [B, L, H*dk].
    v: [B, L, Hv*dv].
    rows: [B/sequences, N, Hv/heads, rows, C] float32: beta (delta rule only) and cumulative log
      decays of each state, then for each sequence the segment number within the chunk (0 is the
      carried segment); None if there are none of these.
    gate: [B, L, Hv*dk] float32, per-channel log decays, or None.
    save: also return, in q's dtype, the state before each chunk [B, N, Hv, dk, dv] and, for the
      delta rule, X = (I + A)^-1 [B, N, Hv, C, C].
  """
  B, L, _ = q.shape
  Hv, N = v.shape[2] // tile.dv, L // tile.chunk
  spec = block_specs(tile)
  in_specs, args = [spec["key"], spec["key"], spec["value"]], [q, k, v]
  if tile.row_count:
    in_specs, args = [*in_specs, spec["rows"]], [*args, rows]
  if tile.per_channel:
    in_specs, args = [*in_specs, spec["gate"]], [*args, gate]
  if S0 is not None:
    in_specs, args = [*in_specs, spec["state"]], [*args, S0]
  out_specs = [spec["value"], spec["state"]]
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    jax.ShapeDtypeStruct((B, Hv, tile.dk, tile.dv), F32),
  ]
  if save:
    out_specs.append(spec["states"])
    out_shape.append(jax.ShapeDtypeStruct((B, N, Hv, tile.dk, tile.dv), q.dtype))
  if save and tile.delta_rule:
    out_specs.append(spec["X"])
    out_shape.append(jax.ShapeDtypeStruct((B, N, Hv, tile.chunk, tile.chunk), q.dtype))
  return pl.pallas_call(
    functools.partial(_body, tile=tile, with_S0=S0 is not None, save=save),
    grid=(B // tile.sequences, Hv // tile.heads, N),
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=compiler_params(),
    interpret=interpret,
    name=f"{tile.name}_fwd",
  )(*args)
