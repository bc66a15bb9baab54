"""Backward on TPU: one kernel walks the chunks from the last to the first.

It reads the inputs, the gradient of o and what the forward saved per chunk: the state before it
and, of the delta rule, X = (I + A)^-1. Scores and R are computed again. dS stays in VMEM.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.tiling import SUBLANES
from pallas_kernels.delta_rule.pallas_tpu.decay import Decays, as_columns, as_rows
from pallas_kernels.delta_rule.pallas_tpu.inverse import Inverse
from pallas_kernels.delta_rule.pallas_tpu.matmul import F32, NT, TN, gram, matmul
from pallas_kernels.delta_rule.pallas_tpu.per_channel_gate import sums_from
from pallas_kernels.delta_rule.pallas_tpu.tiles import block_specs, compiler_params


def _body(*refs, tile):
  # q, k [sequences, C, key_heads*dk]; v, do [sequences, C, heads*dv]; rows [rows, C];
  # S [sequences, heads, dk, dv]; X [sequences, heads, C, C]
  q_ref, k_ref, v_ref, do_ref, dS_last_ref, S_ref, *refs = refs
  X_ref = refs.pop(0) if tile.delta_rule else None
  rows_ref = refs.pop(0) if tile.rows else None
  gate_ref = refs.pop(0) if tile.channels else None
  dq_ref, dk_ref, dv_ref, dS_ref, *refs = refs
  key, dtype = tile.key, k_ref.dtype
  each = lambda f: [f(u) for u in range(tile.states)]
  keys = lambda f: [f(i) for i in range(tile.keys)]

  @pl.when(pl.program_id(2) == 0)
  def _():
    dS_ref[...] = dS_last_ref[...]

  decays = Decays(tile, rows_ref, gate_ref)
  cast = lambda x: [y.astype(dtype) for y in x]
  carry = each(decays.carry)
  D = each(decays.scores)
  # A factor of carry[u], or nothing to multiply by. Of tokens it stands beside their products with
  # the state; that of channels inside, beside queries and keys.
  times = lambda x, i: x if carry[0] is None else each(lambda u: x[u] * carry[u][i])
  after = lambda x, i: x if tile.channels else times(x, i)

  Q = keys(lambda i: q_ref[tile.keys_at(i)])
  K = keys(lambda i: k_ref[tile.keys_at(i)])
  V = each(lambda u: v_ref[tile.values_at(u)])
  dO = each(lambda u: do_ref[tile.values_at(u)])
  if tile.scale != 1.0:
    dO = cast([x.astype(F32) * tile.scale for x in dO])
  S = each(lambda u: S_ref[tile.state_at(u)])
  dS = each(lambda u: dS_ref[tile.state_at(u)])
  dSd = cast(dS)

  Qs, Ks = (each(lambda u: x[key(u)]) for x in (Q, K))
  wide = lambda x: [y.astype(F32) for y in x]
  Q_into, K_into, K_out = Qs, Ks, Ks
  if tile.channels:
    Q_into, K_into, K_out = (cast(times(wide(x), i)) for x, i in ((Qs, 0), (Ks, 0), (Ks, 1)))
  if tile.delta_rule:
    beta = each(decays.beta)
    if tile.channels:
      KK = each(lambda u: decays.strict(u, decays.channels[u].scores(Ks[u], Ks[u]), None))
      A = missing = [None] * tile.states
    else:
      KK, missing = (each(lambda u: x[key(u)]) for x in zip(*keys(lambda i: gram(K[i]))))
      erase = lambda x: each(lambda u: decays.erase(u, x[u], D[u]))
      A = erase(KK) if dtype == F32 else [None] * tile.states
      missing = erase(missing)
    X = each(lambda u: Inverse.of(X_ref[tile.state_at(u)], A[u], missing[u]))
  if tile.channels:
    QK = each(lambda u: decays.channels[u].scores(Qs[u], Ks[u]))
  else:
    QK = keys(lambda i: matmul(Q[i], K[i], NT))
    QK = each(lambda u: QK[key(u)])
  P = each(lambda u: decays.lower(u, QK[u], D[u]).astype(dtype))
  R = V
  if tile.delta_rule:
    KS = after(each(lambda u: matmul(K_into[u], S[u])), 0)
    Z = each(lambda u: V[u].astype(F32) - KS[u])
    R = cast(each(lambda u: X[u].times((Z[u] * beta[u]).astype(dtype))[0]))
  KdS = after(each(lambda u: matmul(K_out[u], dSd[u])), 1)
  dV = each(lambda u: matmul(P[u], dO[u], TN) + KdS[u])
  if tile.delta_rule:
    dR = cast(dV)
    dY, rest = zip(*each(lambda u: X[u].times(dR[u], TN)))
    dV = each(lambda u: dY[u] * beta[u])
    dVd, dYd = cast(dV), cast(dY)
  dO_state = dO if tile.channels or carry[0] is None else cast(times(wide(dO), 0))
  # The gradients of what queries and keys meet: Q K^T, then the state.
  dP = each(lambda u: matmul(dO[u], R[u], NT))
  if tile.delta_rule:
    dA = each(lambda u: -matmul(dYd[u], R[u], NT))
    L = each(lambda u: decays.strict(u, dA[u], D[u]))
    dKK = each(lambda u: L[u] * beta[u])
  if tile.channels:
    dP = each(lambda u: decays.with_transpose(u, dP[u], matmul(R[u], dO[u], NT)).astype(dtype))
    dQ, dK_met = zip(*each(lambda u: decays.channels[u].score_gradients(Qs[u], Ks[u], dP[u])))
    dQ_state = times(each(lambda u: matmul(dO[u], S[u], NT)), 0)
    dQ = each(lambda u: dQ_state[u] + dQ[u])
  else:
    dQKd = cast(each(lambda u: decays.lower(u, dP[u], D[u])))
    dQ = each(lambda u: matmul(dO_state[u], S[u], NT) + matmul(dQKd[u], Ks[u]))
    dK_met = each(lambda u: matmul(dQKd[u], Qs[u], TN))
  # A key is written for later tokens, is met by them, and delta_rule at its own.
  dK_write = times(each(lambda u: matmul(R[u], dSd[u], NT)), 1)
  dK_erase = None
  if tile.delta_rule:
    if tile.channels:
      dV_state = dVd
      turned = each(lambda u: -matmul(R[u], dYd[u], NT) * decays.row[u : u + 1])
      dKK = each(lambda u: decays.with_transpose(u, dKK[u], turned[u]).astype(dtype))
      dK_erase, met = zip(*each(lambda u: decays.channels[u].score_gradients(Ks[u], Ks[u], dKK[u])))
      dK_state = times(each(lambda u: matmul(dVd[u], S[u], NT)), 0)
      dK_erase = each(lambda u: dK_erase[u] - dK_state[u])
      dK_met = each(lambda u: dK_met[u] + met[u])
    else:
      dKKd = cast(dKK)
      dV_state = dVd if carry[0] is None else cast(times(dV, 0))
      dK_met = each(lambda u: dK_met[u] + matmul(dKKd[u], Ks[u], TN))
      dK_erase = each(lambda u: matmul(dKKd[u], Ks[u]) - matmul(dV_state[u], S[u], NT))
  dK = each(lambda u: dK_write[u] + dK_met[u])
  if tile.delta_rule:
    dK = each(lambda u: dK_erase[u] + dK[u])
  for i in range(tile.keys):
    own = [u for u in range(tile.states) if key(u) == i]
    dq_ref[tile.keys_at(i)] = sum(dQ[u] for u in own).astype(dq_ref.dtype)
    dk_ref[tile.keys_at(i)] = sum(dK[u] for u in own).astype(dk_ref.dtype)
  for u in range(tile.states):
    dv_ref[tile.values_at(u)] = dV[u].astype(dv_ref.dtype)

  columns, ends = [], []
  if tile.delta_rule:
    columns += each(lambda u: lane_sums(dY[u] * Z[u], L[u] * KK[u]))

  def gate_gradient(u):
    """That of b, and what belongs to the last one of them: by written keys, by the state."""
    # q_i and the erasing k_i stand beside e^{b_i}, the k_j that they meet beside e^{-b_j}, and the
    # written k_i beside e^{b_C - b_i}: the last one's terms in b_i and in b_C cancel. Kept, their
    # rounding would drown small gradients.
    q, k, write = Qs[u].astype(F32), Ks[u].astype(F32), without_last(dK_write[u])
    of_key = write + dK_met[u]
    of_key = dK_erase[u] - of_key if tile.delta_rule else -of_key
    return q * dQ[u] + k * of_key, k * write, dS[u] * S[u].astype(F32)

  if tile.gates:
    for u in range(tile.states):
      db, written, state = gate_gradient(u)
      columns.append(jnp.sum(db, axis=1, keepdims=True))
      ends.append(total(written) + total(state) * carry[u][2])
  if columns:
    drows_ref, *refs = refs
    drows = as_rows(columns)
    if ends:
      ends = jnp.concatenate(ends, axis=0)
      at_end = lax.broadcasted_iota(jnp.int32, drows.shape, 1) == tile.chunk - 1
      if tile.delta_rule:
        ends = jnp.concatenate([jnp.zeros_like(ends), ends], axis=0)
      drows = drows + jnp.where(at_end, ends, 0.0)
    drows_ref[...] = drows
  kept = dS if tile.channels else times(dS, 2)
  if tile.channels:
    db, written, state = zip(*each(gate_gradient))
    state = as_rows([jnp.sum(x, axis=1, keepdims=True) for x in state])
    at_end = lax.broadcasted_iota(jnp.int32, db[0].shape, 0) == tile.chunk - 1
    for u in range(tile.states):
      end = jnp.sum(written[u], axis=0, keepdims=True) + state[u : u + 1] * carry[u][2]
      refs[0][tile.gates_at(u)] = sums_from(db[u] + jnp.where(at_end, end, 0.0))
    whole = as_columns(each(lambda u: carry[u][2]))
    kept = each(lambda u: dS[u] * whole[u])
  if tile.delta_rule and rest[0] is not None:
    rest = times(each(lambda u: rest[u] * beta[u]), 0)
  for u in range(tile.states):
    dS_u = kept[u] + matmul(Q_into[u], dO_state[u], TN)
    if tile.delta_rule:
      dS_u = dS_u - matmul(K_into[u], dV_state[u], TN, rest=rest[u])
    dS_ref[tile.state_at(u)] = dS_u


def lane_sums(x, y):
  """The sums of the rows of x and y: [C, 1]; where their lanes match, of x + y at once."""
  if x.shape == y.shape:
    return jnp.sum(x + y, axis=1, keepdims=True)
  return jnp.sum(x, axis=1, keepdims=True) + jnp.sum(y, axis=1, keepdims=True)


def without_last(x):
  """x with zeros in its last row."""
  head, tail = x[:-SUBLANES], x[-SUBLANES:]
  last = lax.broadcasted_iota(jnp.int32, tail.shape, 0) == SUBLANES - 1
  return jnp.concatenate([head, jnp.where(last, 0.0, tail)], axis=0)


def total(x):
  """The sum of all of x, [1, 1]: rows first, which needs no lane to meet another."""
  return jnp.sum(jnp.sum(x, axis=0, keepdims=True), axis=1, keepdims=True)


def backward(q, k, v, rows, gate, states, X, do, dS, *, tile, interpret=False):
  """dq, dk, dv, dS0, drows, dgate from the forward's inputs, what it saved, gradients of o and S.

  Where J programs share key heads, dq and dk are [B, L, J*key_heads*dk] float32 parts to be summed.
  drows is [B/sequences, N, J, rows, C]: dbeta of the delta rule, then with gates the gradient of
  the cumulative log decay, a row for each state; None if there is neither. dgate is that of the log
  decays of channels, or None.
  """
  B, L, _ = q.shape
  J, N = v.shape[2] // (tile.heads * tile.dv), L // tile.chunk
  programs = B // tile.sequences
  spec = block_specs(tile, last=N - 1)
  shared = tile.ratio > tile.heads
  dkey = jax.ShapeDtypeStruct((B, L, J * tile.key_heads * tile.dk), F32 if shared else q.dtype)
  args = [q, k, v, do, dS, states]
  in_specs = [spec[x] for x in ("key", "key", "value", "value", "state", "states")]
  if tile.delta_rule:
    args, in_specs = [*args, X], [*in_specs, spec["X"]]
  if tile.rows:
    args, in_specs = [*args, rows], [*in_specs, spec["rows"]]
  if tile.channels:
    args, in_specs = [*args, gate], [*in_specs, spec["gate"]]
  out_specs = [spec["dkey"], spec["dkey"], spec["value"], spec["state"]]
  out_shape = [
    dkey,
    dkey,
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    jax.ShapeDtypeStruct(dS.shape, F32),
  ]
  if drows := (tile.delta_rule + bool(tile.gates)) * tile.states:
    block = (None, None, None, drows, tile.chunk)
    out_specs.append(pl.BlockSpec(block, lambda b, j, n: (b, N - 1 - n, j, 0, 0)))
    out_shape.append(jax.ShapeDtypeStruct((programs, N, J, drows, tile.chunk), F32))
  if tile.channels:
    out_specs.append(spec["gate"])
    out_shape.append(jax.ShapeDtypeStruct(gate.shape, F32))
  out = pl.pallas_call(
    functools.partial(_body, tile=tile),
    grid=(programs, J, N),
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=compiler_params(),
    interpret=interpret,
    name=f"{tile.name}_bwd",
  )(*args)
  dq, dk, dv, dS0, *rest = out
  return dq, dk, dv, dS0, rest.pop(0) if drows else None, rest[0] if tile.channels else None
