"""Forward on TPU: one kernel reads q, k, v, beta, g and writes o and the last state.

Of the delta rule, and of linear attention, which has no beta and nothing to invert: R is V.

Grid (batch, head group, chunk); the states of a group stay in VMEM over its chunks. They are worked
on stage by stage, so that one state's products hide the latency of another's.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.delta_rule.pallas_tpu.decay import Decays, as_columns
from pallas_kernels.delta_rule.pallas_tpu.inverse import Inverse, unit_lower_inverse
from pallas_kernels.delta_rule.pallas_tpu.matmul import F32, NT, TN, gram, matmul
from pallas_kernels.delta_rule.pallas_tpu.tiles import block_specs, compiler_params


def _body(*refs, tile, with_S0, save):
  # q, k [sequences, C, key_heads*dk]; v, o [sequences, C, heads*dv]; rows [rows, C];
  # S [sequences, heads, dk, dv]; X [sequences, heads, C, C]
  q_ref, k_ref, v_ref, *refs = refs
  rows_ref = refs.pop(0) if tile.rows else None
  gate_ref = refs.pop(0) if tile.channels else None
  S0_ref = refs.pop(0) if with_S0 else None
  o_ref, S_ref, *saved_refs = refs

  @pl.when(pl.program_id(2) == 0)
  def _():
    S_ref[...] = S0_ref[...] if with_S0 else jnp.zeros_like(S_ref)

  key, dtype = tile.key, k_ref.dtype
  decays = Decays(tile, rows_ref, gate_ref)
  each = lambda f: [f(u) for u in range(tile.states)]
  keys = lambda f: [f(i) for i in range(tile.keys)]
  Q = keys(lambda i: q_ref[tile.keys_at(i)])
  K = keys(lambda i: k_ref[tile.keys_at(i)])
  D = each(decays.scores)
  S = each(lambda u: S_ref[tile.state_at(u)])
  Sd = each(lambda u: S[u].astype(dtype))
  # Channels decay before they meet the state, tokens after.
  into = lambda u, x: (x.astype(F32) * decays.channels[u].into).astype(dtype)
  read = lambda x: each(lambda u: matmul(into(u, x[key(u)]) if tile.channels else x[key(u)], Sd[u]))
  if tile.delta_rule:
    if tile.channels:
      KK = each(lambda u: decays.channels[u].scores(K[key(u)], K[key(u)]))
      A, missing = each(lambda u: decays.erase(u, KK[u], None)), [None] * tile.states
    else:
      KK, missing = zip(*keys(lambda i: gram(K[i])))
      A = each(lambda u: decays.erase(u, KK[key(u)], D[u]))
      missing = each(lambda u: decays.erase(u, missing[key(u)], D[u]))
    # Before the inverse: its substitution leaves the matrix units idle.
    KS = read(K)
    X = unit_lower_inverse(A, tile.base, tile.inverse_precision)
    X = each(lambda u: X[u].astype(dtype))
    inverse = each(lambda u: Inverse.of(X[u], A[u], missing[u]))
  if tile.channels:
    QK = each(lambda u: decays.channels[u].scores(Q[key(u)], K[key(u)]))
  else:
    QK = keys(lambda i: matmul(Q[i], K[i], NT))
    QK = each(lambda u: QK[key(u)])
  P = each(lambda u: decays.lower(u, QK[u], D[u]).astype(dtype))
  QS = read(Q)
  if save:
    for u in range(tile.states):
      saved_refs[0][tile.state_at(u)] = Sd[u]
      if tile.delta_rule:
        saved_refs[1][tile.state_at(u)] = X[u]
  carry = each(decays.carry)
  carried = (tile.gates or tile.packed) and not tile.channels
  if carried:
    QS = each(lambda u: QS[u] * carry[u][0])
    S = each(lambda u: S[u] * carry[u][2])
  if tile.channels:
    whole = as_columns(each(lambda u: carry[u][2]))
    S = each(lambda u: S[u] * whole[u])
  if tile.delta_rule:
    if carried:
      KS = each(lambda u: KS[u] * carry[u][0])
    V = each(lambda u: v_ref[tile.values_at(u)].astype(F32))
    # Y and, in the state, R keep two bfloat16 parts: their rounding is what limits (BUILD_NOTES).
    Y = each(lambda u: (V[u] - KS[u]) * decays.beta(u))
    R, rest = zip(*each(lambda u: inverse[u].times(Y[u])))
  else:
    R, rest = each(lambda u: v_ref[tile.values_at(u)]), [None] * tile.states
  Rd = each(lambda u: R[u].astype(dtype))
  written, written_rest, writing = R, rest, each(lambda u: K[key(u)])
  if carried:
    written = each(lambda u: R[u].astype(F32) * carry[u][1])
  if not tile.delta_rule:
    written = each(lambda u: written[u].astype(dtype))
  if carried and rest[0] is not None:
    written_rest = each(lambda u: rest[u] * carry[u][1])
  if tile.channels:
    writing = each(lambda u: (K[key(u)].astype(F32) * carry[u][1]).astype(dtype))
  for u in range(tile.states):
    O = QS[u] + matmul(P[u], Rd[u], rest=rest[u])
    O = O if tile.scale == 1.0 else O * tile.scale
    o_ref[tile.values_at(u)] = O.astype(o_ref.dtype)
    S_ref[tile.state_at(u)] = S[u] + matmul(writing[u], written[u], TN, rest=written_rest[u])


def forward(q, k, v, rows, gate, S0, *, tile, save=False, interpret=False):
  """o, S (and what the backward needs) from q, k [B, L, H*dk], v [B, L, Hv*dv] and rows.

  Args:
    rows: [B/sequences, N, Hv/heads, rows, C] float32: beta (of the delta rule) and cumulative log
      decays of each state, number of the segment within the chunk (0: the carried one) of each
      sequence; None if there is nothing of these.
    gate: [B, L, Hv*dk] float32, log decays of key channels, or None.
    save: also return, in q's dtype, the states before each chunk [B, N, Hv, dk, dv] and, of the
      delta rule, X = (I + A)^-1 [B, N, Hv, C, C].
  """
  B, L, _ = q.shape
  Hv, N = v.shape[2] // tile.dv, L // tile.chunk
  spec = block_specs(tile)
  in_specs, args = [spec["key"], spec["key"], spec["value"]], [q, k, v]
  if tile.rows:
    in_specs, args = [*in_specs, spec["rows"]], [*args, rows]
  if tile.channels:
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
