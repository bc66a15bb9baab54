"""Backward on TPU: one kernel walks the chunks from the last to the first.

It reads the inputs, the gradient of o and what the forward saved per chunk: the state before it
and, of the delta rule, X = (I + A)^-1. Scores and R are computed again. dS stays in VMEM.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.delta_rule.pallas_tpu.chunk import Decays
from pallas_kernels.delta_rule.pallas_tpu.inverse import Inverse
from pallas_kernels.delta_rule.pallas_tpu.products import F32, NT, TN, gram, matmul
from pallas_kernels.delta_rule.pallas_tpu.tiles import block_specs, compiler_params
from pallas_kernels.tiling import SUBLANES, round_up


def _body(*refs, tile):
  # q, k [sequences, C, key_heads*dk]; v, do [sequences, C, heads*dv]; rows [rows, C];
  # S [sequences, heads, dk, dv]; X [sequences, heads, C, C]
  q_ref, k_ref, v_ref, do_ref, dS_last_ref, S_ref, *refs = refs
  X_ref = refs.pop(0) if tile.erases else None
  rows_ref = refs.pop(0) if tile.rows else None
  dq_ref, dk_ref, dv_ref, dS_ref, *refs = refs
  key, dtype = tile.key, k_ref.dtype
  each = lambda f: [f(u) for u in range(tile.states)]
  keys = lambda f: [f(i) for i in range(tile.keys)]

  @pl.when(pl.program_id(2) == 0)
  def _():
    dS_ref[...] = dS_last_ref[...]

  decays = Decays(tile, rows_ref)
  cast = lambda x: [y.astype(dtype) for y in x]
  carry = each(decays.carry)
  D = each(decays.scores)
  # A factor of carry[u], or nothing to multiply by.
  times = lambda x, i: x if carry[0] is None else each(lambda u: x[u] * carry[u][i])

  Q = keys(lambda i: q_ref[tile.keys_at(i)])
  K = keys(lambda i: k_ref[tile.keys_at(i)])
  V = each(lambda u: v_ref[tile.values_at(u)])
  dO = each(lambda u: do_ref[tile.values_at(u)])
  if tile.scale != 1.0:
    dO = cast([x.astype(F32) * tile.scale for x in dO])
  S = each(lambda u: S_ref[tile.state_at(u)])
  dS = each(lambda u: dS_ref[tile.state_at(u)])
  dSd = cast(dS)

  if tile.erases:
    beta = each(decays.beta)
    KK, missing = zip(*keys(lambda i: gram(K[i])))
    erase = lambda x: each(lambda u: decays.erase(u, x[key(u)], D[u]))
    A = erase(KK) if dtype == F32 else [None] * tile.states
    missing = erase(missing)
    X = each(lambda u: Inverse.of(X_ref[tile.state_at(u)], A[u], missing[u]))
  QK = keys(lambda i: matmul(Q[i], K[i], NT))
  P = each(lambda u: decays.lower(u, QK[key(u)], D[u]).astype(dtype))
  R = V
  if tile.erases:
    KS = times(each(lambda u: matmul(K[key(u)], S[u])), 0)
    Z = each(lambda u: V[u].astype(F32) - KS[u])
    R = cast(each(lambda u: X[u].times((Z[u] * beta[u]).astype(dtype))[0]))
  KdS = times(each(lambda u: matmul(K[key(u)], dSd[u])), 1)
  dV = each(lambda u: matmul(P[u], dO[u], TN) + KdS[u])
  if tile.erases:
    dR = cast(dV)
    dY, rest = zip(*each(lambda u: X[u].times(dR[u], TN)))
    dV = each(lambda u: dY[u] * beta[u])
    dVd, dYd = cast(dV), cast(dY)
  # The gradients of QK^T and of KK^T, before the decay of their scores.
  dP = each(lambda u: matmul(dO[u], R[u], NT))
  dQK = each(lambda u: decays.lower(u, dP[u], D[u]))
  dQKd = cast(dQK)
  dO_state = dO if carry[0] is None else cast(times([x.astype(F32) for x in dO], 0))
  dQ = each(lambda u: matmul(dO_state[u], S[u], NT) + matmul(dQKd[u], K[key(u)]))
  # A key is written for later tokens, is met by them, and erases at its own.
  dK_write = times(each(lambda u: matmul(R[u], dSd[u], NT)), 1)
  dK_met = each(lambda u: matmul(dQKd[u], Q[key(u)], TN))
  dK_erase = None
  if tile.erases:
    dA = each(lambda u: -matmul(dYd[u], R[u], NT))
    L = each(lambda u: decays.strict(u, dA[u], D[u]))
    dKKd = cast(each(lambda u: L[u] * beta[u]))
    dV_state = dVd if carry[0] is None else cast(times(dV, 0))
    dK_met = each(lambda u: dK_met[u] + matmul(dKKd[u], K[key(u)], TN))
    dK_erase = each(lambda u: matmul(dKKd[u], K[key(u)]) - matmul(dV_state[u], S[u], NT))
  dK = each(lambda u: dK_write[u] + dK_met[u])
  if tile.erases:
    dK = each(lambda u: dK_erase[u] + dK[u])
  for i in range(tile.keys):
    own = [u for u in range(tile.states) if key(u) == i]
    dq_ref[tile.keys_at(i)] = sum(dQ[u] for u in own).astype(dq_ref.dtype)
    dk_ref[tile.keys_at(i)] = sum(dK[u] for u in own).astype(dk_ref.dtype)
  for u in range(tile.states):
    dv_ref[tile.values_at(u)] = dV[u].astype(dv_ref.dtype)

  columns, ends = [], []
  if tile.erases:
    columns += each(lambda u: lane_sums(dY[u] * Z[u], L[u] * KK[key(u)]))
  if tile.gates:
    for u in range(tile.states):
      # q_i and the erasing k_i stand beside e^{b_i}, the k_j that they meet beside e^{-b_j}, and
      # the written k_i beside e^{b_C - b_i}: the last one's terms in b_i and in b_C cancel. Kept,
      # their rounding would drown small gradients.
      q, k = Q[key(u)].astype(F32), K[key(u)].astype(F32)
      write = without_last(dK_write[u])
      of_key = write + dK_met[u]
      of_key = -of_key if dK_erase is None else dK_erase[u] - of_key
      columns.append(jnp.sum(q * dQ[u] + k * of_key, axis=1, keepdims=True))
      ends.append(total(k * write) + total(dS[u] * S[u].astype(F32)) * carry[u][2])
  if columns:
    drows_ref, C = refs[0], tile.chunk
    drows = as_rows(columns, C)
    if ends:
      ends = jnp.concatenate(ends, axis=0)
      at_end = lax.broadcasted_iota(jnp.int32, (len(columns), C), 1) == C - 1
      if tile.erases:
        ends = jnp.concatenate([jnp.zeros_like(ends), ends], axis=0)
      drows = drows + jnp.where(at_end, ends, 0.0)
    drows_ref[...] = drows

  kept = times(dS, 2)
  if tile.erases and dtype == F32:
    rest = times(each(lambda u: rest[u] * beta[u]), 0)
  for u in range(tile.states):
    dS_u = kept[u] + matmul(Q[key(u)], dO_state[u], TN)
    if tile.erases:
      dS_u = dS_u - matmul(K[key(u)], dV_state[u], TN, rest=rest[u])
    dS_ref[tile.state_at(u)] = dS_u


def as_rows(columns, C):
  """Columns [C, 1] as rows [n, C], by one transpose."""
  n = len(columns)
  width = round_up(n, SUBLANES)
  lane = lax.broadcasted_iota(jnp.int32, (C, width), 1)
  joined = jnp.zeros((C, width), F32)
  for i, x in enumerate(columns):
    joined = jnp.where(lane == i, x, joined)
  return joined.T[:n]


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


def backward(q, k, v, rows, states, X, do, dS, *, tile, interpret=False):
  """dq, dk, dv, dS0 and drows from the forward's inputs, what it saved, and gradients of o and S.

  Where J programs share key heads, dq and dk are [B, L, J*key_heads*dk] float32 parts to be summed.
  drows is [B/sequences, N, J, rows, C]: dbeta of the delta rule, then with gates the gradient of
  the cumulative log decay, a row for each state; None if there is neither.
  """
  B, L, _ = q.shape
  J, N = v.shape[2] // (tile.heads * tile.dv), L // tile.chunk
  programs = B // tile.sequences
  spec = block_specs(tile, last=N - 1)
  shared = tile.ratio > tile.heads
  dkey = jax.ShapeDtypeStruct((B, L, J * tile.key_heads * tile.dk), F32 if shared else q.dtype)
  args = [q, k, v, do, dS, states]
  in_specs = [spec[x] for x in ("key", "key", "value", "value", "state", "states")]
  if tile.erases:
    args, in_specs = [*args, X], [*in_specs, spec["X"]]
  if tile.rows:
    args, in_specs = [*args, rows], [*in_specs, spec["rows"]]
  out_specs = [spec["dkey"], spec["dkey"], spec["value"], spec["state"]]
  out_shape = [
    dkey,
    dkey,
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    jax.ShapeDtypeStruct(dS.shape, F32),
  ]
  if drows := (tile.erases + bool(tile.gates)) * tile.states:
    block = (None, None, None, drows, tile.chunk)
    out_specs.append(pl.BlockSpec(block, lambda b, j, n: (b, N - 1 - n, j, 0, 0)))
    out_shape.append(jax.ShapeDtypeStruct((programs, N, J, drows, tile.chunk), F32))
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
  return out if drows else (*out, None)
