"""Delta rule on TPU, backward: one kernel walks the chunks from the last to the first.

It reads the inputs, the gradient of o and two things the forward saved per chunk, X = (I + A)^-1
and the state before the chunk; scores and R are computed again. dS stays in VMEM.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.delta_rule.pallas_tpu.chunk import Decays, masked
from pallas_kernels.delta_rule.pallas_tpu.inverse import Inverse
from pallas_kernels.delta_rule.pallas_tpu.products import F32, NT, TN, gram, matmul
from pallas_kernels.delta_rule.pallas_tpu.tiles import block_specs, compiler_params


def _body(*refs, tile):
  # q, k [C, key_heads*dk]; v, do [C, heads*dv]; rows [rows, C]; X [heads, C, C]; S [heads, dk, dv]
  q_ref, k_ref, v_ref, rows_ref, do_ref, X_ref, S_ref, dS_last_ref, *refs = refs
  dq_ref, dk_ref, dv_ref, drows_ref, dS_ref = refs
  dk, dv, kh, dtype = tile.dk, tile.dv, tile.key_head, k_ref.dtype
  heads, key_heads = range(tile.heads), range(tile.key_heads)

  @pl.when(pl.program_id(2) == 0)
  def _():
    dS_ref[...] = dS_last_ref[...]

  decays = Decays(tile, rows_ref)
  cast = lambda x: [y.astype(dtype) for y in x]
  beta = [decays.beta(h) for h in heads]
  carry = [decays.carry(h) for h in heads]
  D = [decays.scores(h) for h in heads]
  # A factor of carry[h], or nothing to multiply by.
  times = lambda x, i: x if carry[0] is None else [x[h] * carry[h][i] for h in heads]

  Q = [q_ref[:, h * dk : (h + 1) * dk] for h in key_heads]
  K = [k_ref[:, h * dk : (h + 1) * dk] for h in key_heads]
  V = [v_ref[:, h * dv : (h + 1) * dv].astype(F32) for h in heads]
  dO = [do_ref[:, h * dv : (h + 1) * dv] for h in heads]
  if tile.scale != 1.0:
    dO = cast([x.astype(F32) * tile.scale for x in dO])
  S = [S_ref[h] for h in heads]
  dS = [dS_ref[h] for h in heads]
  dSd = cast(dS)

  KK, missing = zip(*[gram(K[h]) for h in key_heads])
  erase = lambda x: [decays.erase(h, x[kh(h)], D[h]) for h in heads]
  A = erase(KK) if dtype == F32 else [None] * tile.heads
  X = [Inverse.of(X_ref[h], a, rest) for h, a, rest in zip(heads, A, erase(missing))]
  QK = [matmul(Q[h], K[h], NT) for h in key_heads]
  P = [masked(decays.lower, QK[kh(h)], D[h]).astype(dtype) for h in heads]
  KS = times([matmul(K[kh(h)], S[h]) for h in heads], 0)
  Z = [V[h] - KS[h] for h in heads]
  R = cast([X[h].times((Z[h] * beta[h]).astype(dtype))[0] for h in heads])
  KdS = times([matmul(K[kh(h)], dSd[h]) for h in heads], 1)
  dR = cast([matmul(P[h], dO[h], TN) + KdS[h] for h in heads])
  dY, rest = zip(*[X[h].times(dR[h], TN) for h in heads])
  dZ = [dY[h] * beta[h] for h in heads]
  dZd, dYd = cast(dZ), cast(dY)
  # The gradients of QK^T and of KK^T, before the decay of their scores.
  dP = [matmul(dO[h], R[h], NT) for h in heads]
  dA = [-matmul(dYd[h], R[h], NT) for h in heads]
  dQK = [masked(decays.lower, dP[h], D[h]) for h in heads]
  L = [masked(decays.strict, dA[h], D[h]) for h in heads]
  dKK = [L[h] * beta[h] for h in heads]
  dQKd, dKKd = cast(dQK), cast(dKK)
  # By the three ways a key or query meets the state: query, erase, write.
  dQ_state = times([matmul(dO[h], S[h], NT) for h in heads], 0)
  dK_erase = times([matmul(dZd[h], S[h], NT) for h in heads], 0)
  dK_write = times([matmul(R[h], dSd[h], NT) for h in heads], 1)
  dQ = [dQ_state[h] + matmul(dQKd[h], K[kh(h)]) for h in heads]
  dK = [
    (dK_write[h] - dK_erase[h])
    + (matmul(dQKd[h], Q[kh(h)], TN) + matmul(dKKd[h], K[kh(h)], TN))
    + matmul(dKKd[h], K[kh(h)])
    for h in heads
  ]
  for h in key_heads:
    own = [j for j in heads if kh(j) == h]
    dq_ref[:, h * dk : (h + 1) * dk] = sum(dQ[j] for j in own).astype(dq_ref.dtype)
    dk_ref[:, h * dk : (h + 1) * dk] = sum(dK[j] for j in own).astype(dk_ref.dtype)

  # Columns first: they are sums over lanes. One transpose turns all of them into rows.
  C, width = tile.chunk, max(8, -(-tile.rows // 8) * 8)
  lane = lax.broadcasted_iota(jnp.int32, (C, width), 1)
  columns = jnp.zeros((C, width), F32)
  rows = []
  for h in heads:
    dv_ref[:, h * dv : (h + 1) * dv] = dZ[h].astype(dv_ref.dtype)
    lane_sum = lambda x: jnp.sum(x, axis=1, keepdims=True)
    dbeta = lane_sum(dY[h] * Z[h]) + lane_sum(L[h] * KK[kh(h)])
    columns = jnp.where(lane == h, dbeta, columns)
    if tile.gated:
      q, k = Q[kh(h)].astype(F32), K[kh(h)].astype(F32)
      W = jnp.where(decays.strict, dQK[h] * QK[kh(h)], 0.0) + dKK[h] * KK[kh(h)]
      # The last row's terms in b_i and in b_C cancel; kept, their rounding drowns small gradients.
      last = lax.broadcasted_iota(jnp.int32, k.shape, 0) == C - 1
      write = jnp.where(last, 0.0, k * dK_write[h])
      db = lane_sum(W) + lane_sum(q * dQ_state[h] - k * dK_erase[h] - write)
      columns = jnp.where(lane == tile.heads + h, db, columns)
      end = jnp.sum(lane_sum(write), axis=0, keepdims=True)
      kept = jnp.sum(lane_sum(dS[h] * S[h].astype(F32)), axis=0, keepdims=True)
      end = end + kept * carry[h][2]
      at_end = lax.broadcasted_iota(jnp.int32, (1, C), 1) == C - 1
      rows.append(jnp.where(at_end, end, 0.0) - jnp.sum(W, axis=0, keepdims=True))
  drows = columns.T
  n = tile.heads
  drows_ref[:n] = drows[:n]
  if tile.gated:
    drows_ref[n : 2 * n] = drows[n : 2 * n] + jnp.concatenate(rows, axis=0)

  dO_state = dO if carry[0] is None else cast(times([x.astype(F32) for x in dO], 0))
  dZ_state = dZd if carry[0] is None else cast(times(dZ, 0))
  if dtype == F32:
    rest = times([rest[h] * beta[h] for h in heads], 0)
  kept = times(dS, 2)
  for h in heads:
    erased = matmul(K[kh(h)], dZ_state[h], TN, rest=rest[h])
    dS_ref[h] = kept[h] + (matmul(Q[kh(h)], dO_state[h], TN) - erased)


def backward(q, k, v, rows, X, states, do, dS, *, tile, interpret=False):
  """dq, dk, dv, drows, dS0 from the forward's inputs, what it saved, and gradients of o and S.

  Where J programs share key heads, dq and dk are [B, L, J*key_heads*dk] float32 parts to be summed.
  drows is [B, N, J, (1 + gated)*heads, C]: dbeta, then the gradient of the cumulative log decay.
  """
  B, N, J = rows.shape[:3]
  L = q.shape[1]
  spec = block_specs(tile, last=N - 1)
  shared = tile.ratio > tile.heads
  out_rows = (1 + tile.gated) * tile.heads
  dkey = jax.ShapeDtypeStruct((B, L, J * tile.key_heads * tile.dk), F32 if shared else q.dtype)
  drows_spec = pl.BlockSpec(
    (None, None, None, out_rows, tile.chunk), lambda b, j, n: (b, N - 1 - n, j, 0, 0)
  )
  return pl.pallas_call(
    functools.partial(_body, tile=tile),
    grid=(B, J, N),
    in_specs=[
      *[spec["key"], spec["key"], spec["value"], spec["rows"], spec["value"]],
      *[spec["X"], spec["states"], spec["state"]],
    ],
    out_specs=[spec["dkey"], spec["dkey"], spec["value"], drows_spec, spec["state"]],
    out_shape=[
      dkey,
      dkey,
      jax.ShapeDtypeStruct(v.shape, v.dtype),
      jax.ShapeDtypeStruct((B, N, J, out_rows, tile.chunk), F32),
      jax.ShapeDtypeStruct(dS.shape, F32),
    ],
    compiler_params=compiler_params(),
    interpret=interpret,
    name="delta_rule_bwd",
  )(q, k, v, rows, do, X, states, dS)
