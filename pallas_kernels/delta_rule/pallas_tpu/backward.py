"""Delta rule on TPU, backward: one kernel walks the chunks from the last to the first.

It reads the inputs, the gradient of o and two things the forward saved per chunk, X = (I + A)^-1
and the state before the chunk; scores and R are computed again. dS stays in VMEM.
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
  # X [sequences, heads, C, C]; S [sequences, heads, dk, dv]
  q_ref, k_ref, v_ref, rows_ref, do_ref, X_ref, S_ref, dS_last_ref, *refs = refs
  dq_ref, dk_ref, dv_ref, drows_ref, dS_ref = refs
  key, dtype = tile.key, k_ref.dtype
  each = lambda f: [f(u) for u in range(tile.states)]
  keys = lambda f: [f(i) for i in range(tile.keys)]

  @pl.when(pl.program_id(2) == 0)
  def _():
    dS_ref[...] = dS_last_ref[...]

  decays = Decays(tile, rows_ref)
  cast = lambda x: [y.astype(dtype) for y in x]
  beta = each(decays.beta)
  carry = each(decays.carry)
  D = each(decays.scores)
  # A factor of carry[u], or nothing to multiply by.
  times = lambda x, i: x if carry[0] is None else each(lambda u: x[u] * carry[u][i])

  Q = keys(lambda i: q_ref[tile.keys_at(i)])
  K = keys(lambda i: k_ref[tile.keys_at(i)])
  V = each(lambda u: v_ref[tile.values_at(u)].astype(F32))
  dO = each(lambda u: do_ref[tile.values_at(u)])
  if tile.scale != 1.0:
    dO = cast([x.astype(F32) * tile.scale for x in dO])
  S = each(lambda u: S_ref[tile.state_at(u)])
  dS = each(lambda u: dS_ref[tile.state_at(u)])
  dSd = cast(dS)

  KK, missing = zip(*keys(lambda i: gram(K[i])))
  erase = lambda x: each(lambda u: decays.erase(u, x[key(u)], D[u]))
  A = erase(KK) if dtype == F32 else [None] * tile.states
  missing = erase(missing)
  X = each(lambda u: Inverse.of(X_ref[tile.state_at(u)], A[u], missing[u]))
  QK = keys(lambda i: matmul(Q[i], K[i], NT))
  P = each(lambda u: decays.lower(u, QK[key(u)], D[u]).astype(dtype))
  KS = times(each(lambda u: matmul(K[key(u)], S[u])), 0)
  Z = each(lambda u: V[u] - KS[u])
  R = cast(each(lambda u: X[u].times((Z[u] * beta[u]).astype(dtype))[0]))
  KdS = times(each(lambda u: matmul(K[key(u)], dSd[u])), 1)
  dR = cast(each(lambda u: matmul(P[u], dO[u], TN) + KdS[u]))
  dY, rest = zip(*each(lambda u: X[u].times(dR[u], TN)))
  dZ = each(lambda u: dY[u] * beta[u])
  dZd, dYd = cast(dZ), cast(dY)
  # The gradients of QK^T and of KK^T, before the decay of their scores.
  dP = each(lambda u: matmul(dO[u], R[u], NT))
  dA = each(lambda u: -matmul(dYd[u], R[u], NT))
  dQK = each(lambda u: decays.lower(u, dP[u], D[u]))
  L = each(lambda u: decays.strict(u, dA[u], D[u]))
  dKK = each(lambda u: L[u] * beta[u])
  dQKd, dKKd = cast(dQK), cast(dKK)
  dO_state, dZ_state = dO, dZd
  if carry[0] is not None:
    dO_state = cast(times([x.astype(F32) for x in dO], 0))
    dZ_state = cast(times(dZ, 0))
  dQ = each(lambda u: matmul(dO_state[u], S[u], NT) + matmul(dQKd[u], K[key(u)]))
  # A key erases at its own token, is written there for later ones, and is met by those.
  dK_erase = each(lambda u: matmul(dKKd[u], K[key(u)]) - matmul(dZ_state[u], S[u], NT))
  dK_write = times(each(lambda u: matmul(R[u], dSd[u], NT)), 1)
  dK_met = each(lambda u: matmul(dQKd[u], Q[key(u)], TN) + matmul(dKKd[u], K[key(u)], TN))
  dK = each(lambda u: dK_erase[u] + (dK_write[u] + dK_met[u]))
  for i in range(tile.keys):
    own = [u for u in range(tile.states) if key(u) == i]
    dq_ref[tile.keys_at(i)] = sum(dQ[u] for u in own).astype(dq_ref.dtype)
    dk_ref[tile.keys_at(i)] = sum(dK[u] for u in own).astype(dk_ref.dtype)

  # Columns first: they are sums over lanes. One transpose turns all of them into rows.
  C, n = tile.chunk, tile.states
  width = round_up(n * (1 + bool(tile.gates)), SUBLANES)
  lane = lax.broadcasted_iota(jnp.int32, (C, width), 1)
  columns = jnp.zeros((C, width), F32)
  ends = []
  for u in range(n):
    dv_ref[tile.values_at(u)] = dZ[u].astype(dv_ref.dtype)
    dbeta = lane_sums(dY[u] * Z[u], L[u] * KK[key(u)])
    columns = jnp.where(lane == u, dbeta, columns)
    if tile.gates:
      # q_i and the erasing k_i stand beside e^{b_i}, the k_j that they meet beside e^{-b_j}, and
      # the written k_i beside e^{b_C - b_i}: the last one's terms in b_i and in b_C cancel. Kept,
      # their rounding would drown small gradients.
      q, k = Q[key(u)].astype(F32), K[key(u)].astype(F32)
      write = without_last(dK_write[u])
      db = q * dQ[u] + k * (dK_erase[u] - (write + dK_met[u]))
      columns = jnp.where(lane == n + u, jnp.sum(db, axis=1, keepdims=True), columns)
      ends.append(total(k * write) + total(dS[u] * S[u].astype(F32)) * carry[u][2])
  drows = columns.T
  drows_ref[:n] = drows[:n]
  if tile.gates:
    at_end = lax.broadcasted_iota(jnp.int32, (n, C), 1) == C - 1
    drows_ref[n : 2 * n] = drows[n : 2 * n] + jnp.where(at_end, jnp.concatenate(ends, axis=0), 0.0)

  if dtype == F32:
    rest = times(each(lambda u: rest[u] * beta[u]), 0)
  kept = times(dS, 2)
  for u in range(n):
    erased = matmul(K[key(u)], dZ_state[u], TN, rest=rest[u])
    dS_ref[tile.state_at(u)] = kept[u] + (matmul(Q[key(u)], dO_state[u], TN) - erased)


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


def backward(q, k, v, rows, X, states, do, dS, *, tile, interpret=False):
  """dq, dk, dv, drows, dS0 from the forward's inputs, what it saved, and gradients of o and S.

  Where J programs share key heads, dq and dk are [B, L, J*key_heads*dk] float32 parts to be summed.
  drows is [B/sequences, N, J, states or twice as many, C]: dbeta, then with gates the gradient of
  the cumulative log decay.
  """
  programs, N, J = rows.shape[:3]
  B, L, _ = q.shape
  spec = block_specs(tile, last=N - 1)
  shared = tile.ratio > tile.heads
  out_rows = (1 + bool(tile.gates)) * tile.states
  dkey = jax.ShapeDtypeStruct((B, L, J * tile.key_heads * tile.dk), F32 if shared else q.dtype)
  drows_spec = pl.BlockSpec(
    (None, None, None, out_rows, tile.chunk), lambda b, j, n: (b, N - 1 - n, j, 0, 0)
  )
  return pl.pallas_call(
    functools.partial(_body, tile=tile),
    grid=(programs, J, N),
    in_specs=[
      *[spec["key"], spec["key"], spec["value"], spec["rows"], spec["value"]],
      *[spec["X"], spec["states"], spec["state"]],
    ],
    out_specs=[spec["dkey"], spec["dkey"], spec["value"], drows_spec, spec["state"]],
    out_shape=[
      dkey,
      dkey,
      jax.ShapeDtypeStruct(v.shape, v.dtype),
      jax.ShapeDtypeStruct((programs, N, J, out_rows, tile.chunk), F32),
      jax.ShapeDtypeStruct(dS.shape, F32),
    ],
    compiler_params=compiler_params(),
    interpret=interpret,
    name="delta_rule_bwd",
  )(q, k, v, rows, do, X, states, dS)
