"""Fused delta rule backward for NVIDIA GPUs: three kernels.

states recomputes R and the state before each chunk. dstates carries dS over all chunks, last to
first, and writes it per chunk; grads then takes all chunks in parallel, one program per (chunk,
head), which owns all of dk and dv. Partial sums of dq and dk over value blocks (one loop doing
both) would move more: 8 dk bytes per token and block written and read again, against 2 dk dv / C
here.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.chunk import (
  load_chunk,
  pick,
  program_ids,
  row_gates,
  scale_rows,
  score_gates,
  strict_lower,
)
from pallas_kernels.delta_rule.pallas_gpu.inverse import load_inverse, times_inverse_split
from pallas_kernels.delta_rule.pallas_gpu.products import F32, NT, TN, dot
from pallas_kernels.delta_rule.pallas_gpu.state import first_state, load_keys, next_state, writes
from pallas_kernels.delta_rule.pallas_gpu.tiles import call, tile_for


def _states_body(k_ref, v_ref, beta_ref, X_ref, *refs, flags, group, block_k, block_v):
  # k [B L H dk], v [B L Hv dv], beta [B L Hv], X [N B Hv matrices C C], g [B L Hv]?,
  # documents [B L]?, S0 [B Hv dk dv]? -> R [B L Hv dv], states [N B Hv dk dv]
  *refs, R_ref, states_ref = refs
  has_g, has_documents = flags
  g_ref, documents_ref, refs = pick(refs, has_g, has_documents)
  j, h, b, hk = program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  parts = parts_for(k_ref.dtype)
  chunk = X_ref.shape[-1]

  def step(n, S):
    rows, beta, _, _, decay = load_chunk(beta_ref, g_ref, documents_ref, n, b, h, chunk)
    K = load_keys(k_ref, (b, rows, hk), key_blocks)
    KS = 0.0
    for i, S_i in enumerate(S):
      KS += dot(K(i), S_i, parts)
    V = v_ref[b, rows, h, cols].astype(F32)
    R, rest = writes(V, KS, beta, decay, X_ref, (n, b, h), parts)
    R_ref[b, rows, h, cols] = R.astype(R_ref.dtype)
    for S_i, keys in zip(S, key_blocks):
      states_ref[n, b, h, keys, cols] = S_i.astype(states_ref.dtype)
    return next_state(S, K, R, rest, decay, parts)

  S = first_state(refs, b, h, key_blocks, cols)
  lax.fori_loop(0, k_ref.shape[1] // chunk, step, S)


def states(k, v, beta, X, g, documents, S0, *, tile=None, interpret=False):
  """R [B L Hv dv] and the state before each chunk [N B Hv dk dv], both in k's dtype.

  The backward's products round both to k's dtype anyway, so bfloat16 inputs lose nothing by it.
  """
  B, _, H, dk = k.shape
  Hv, dv = v.shape[2:]
  tile = tile or tile_for("states", k)
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    _states_body,
    flags=(g is not None, documents is not None),
    group=Hv // H,
    block_k=min(tile.block_k, dk),
    block_v=block_v,
  )
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, k.dtype),
    jax.ShapeDtypeStruct((X.shape[0], B, Hv, dk, dv), k.dtype),
  ]
  options = dict(grid=(dv // block_v, Hv, B), tile=tile, interpret=interpret)
  return call("states", body, (k, v, beta, X, g, documents, S0), out_shape, **options)


def _dstates_body(
  q_ref, k_ref, beta_ref, X_ref, P_ref, do_ref, dS_ref, *refs, flags, group, scale, block_k, block_v
):
  # X [N B Hv matrices C C], P [N B Hv C C], do [B L Hv dv], dS [B Hv dk dv]
  # -> dY [B L Hv dv], dstates [N B Hv dk dv] (of the state after each chunk), dS0 [B Hv dk dv]
  g_ref, documents_ref, (dY_ref, dstates_ref, dS0_ref) = pick(refs, *flags)
  j, h, b, hk = program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  parts = parts_for(k_ref.dtype)
  chunk = X_ref.shape[-1]
  chunks = k_ref.shape[1] // chunk

  def step(done, dS):
    n = chunks - 1 - done
    rows, beta, _, _, decay = load_chunk(beta_ref, g_ref, documents_ref, n, b, h, chunk)
    K = load_keys(k_ref, (b, rows, hk), key_blocks)
    KdS = 0.0
    for i, dS_i in enumerate(dS):
      KdS += dot(K(i), dS_i, parts)
      dstates_ref[n, b, h, key_blocks[i], cols] = dS_i.astype(dstates_ref.dtype)
    dO = do_ref[b, rows, h, cols]
    dR = dot(P_ref[n, b, h, :, :], dO, parts, TN) + scale_rows(KdS, decay.end)
    dY, rest = times_inverse_split(load_inverse(X_ref, (n, b, h)), dR, parts, TN)
    dY_ref[b, rows, h, cols] = dY.astype(dY_ref.dtype)
    dO = scale_rows(dO.astype(F32), decay.start) * scale
    dZ, rest = (scale_rows(scale_rows(x, beta), decay.start) for x in (dY, rest))
    new = []
    for i, dS_i in enumerate(dS):
      kept = dS_i if decay.whole is None else dS_i * decay.whole
      kept += dot(q_ref[b, rows, hk, key_blocks[i]], dO, parts, TN)
      new.append(kept - dot(K(i), dZ, parts, TN, rest))
    return tuple(new)

  dS = tuple(dS_ref[b, h, keys, cols] for keys in key_blocks)
  dS = lax.fori_loop(0, chunks, step, dS)
  for dS_i, keys in zip(dS, key_blocks):
    dS0_ref[b, h, keys, cols] = dS_i


def dstates(q, k, v, beta, X, P, g, documents, do, dS, *, scale, tile=None, interpret=False):
  """dY = X^T dR [B L Hv dv], d(state after each chunk) [N B Hv dk dv] in k's dtype, and dS0."""
  B, _, H, dk = k.shape
  Hv, dv = v.shape[2:]
  tile = tile or tile_for("dstates", k, full=g is not None or documents is not None)
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    _dstates_body,
    flags=(g is not None, documents is not None),
    group=Hv // H,
    scale=scale,
    block_k=min(tile.block_k, dk),
    block_v=block_v,
  )
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, k.dtype),
    jax.ShapeDtypeStruct((X.shape[0], B, Hv, dk, dv), k.dtype),
    jax.ShapeDtypeStruct((B, Hv, dk, dv), F32),
  ]
  options = dict(grid=(dv // block_v, Hv, B), tile=tile, interpret=interpret)
  return call("dstates", body, (q, k, beta, X, P, do, dS, g, documents), out_shape, **options)


def _grads_body(q_ref, k_ref, v_ref, beta_ref, *refs, flags, group, scale, chunk, block_k, block_v):
  # P [N B Hv C C], R, dY, do [B L Hv dv], states, dstates [N B Hv dk dv]
  # -> dq, dk [B L Hv dk], dv [B L Hv dv], dbeta, dg? [B L Hv]
  has_g, has_documents = flags
  g_ref, documents_ref, refs = pick(refs, has_g, has_documents)
  P_ref, R_ref, dY_ref, do_ref, states_ref, dstates_ref, *refs = refs
  dq_ref, dk_ref, dv_ref, dbeta_ref, *dg_refs = refs
  n, h, b, hk = program_ids(group)
  dk, dv = k_ref.shape[-1], v_ref.shape[-1]
  parts = parts_for(k_ref.dtype)
  rows, beta, _, iotas, decay = load_chunk(beta_ref, g_ref, documents_ref, n, b, h, chunk)
  zeros = jnp.zeros((chunk,), F32)

  def keys(i):
    return pl.ds(i * block_k, block_k)

  def values(j):
    return pl.ds(j * block_v, block_v)

  def over_values(j, carry):
    dP, dA, dbeta = carry
    cols = values(j)
    dY = dY_ref[b, rows, h, cols]
    R = R_ref[b, rows, h, cols]
    dP += dot(do_ref[b, rows, h, cols], R, parts, NT)
    dA -= dot(dY, R, parts, NT)
    dY = dY.astype(F32)
    dv_ref[b, rows, h, cols] = (dY * beta[:, None]).astype(dv_ref.dtype)
    return dP, dA, dbeta + jnp.sum(dY * v_ref[b, rows, h, cols].astype(F32), axis=1)

  square = jnp.zeros((chunk, chunk), F32)
  dP, dA, dbeta = lax.fori_loop(0, dv // block_v, over_values, (square, square, zeros))

  def over_gram(i, G):
    K = k_ref[b, rows, hk, keys(i)]
    return G + dot(K, K, parts, NT)

  M = dP * P_ref[n, b, h, :, :].astype(F32) if has_g else None
  # From here on dP, dA and dG are gradients of Q K^T and K K^T before masks and decays.
  inside = decay.inside()
  dP = (dP * inside * scale).astype(k_ref.dtype)
  dA = strict_lower(dA * inside, iotas)
  G = lax.fori_loop(0, dk // block_k, over_gram, square)
  dbeta += jnp.sum(dA * G, axis=1)
  dG = dA * beta[:, None]
  if has_g:
    dg = score_gates(M + dG * G, parts, iotas)
  # Strictly lower, so that the sum is exact: one product takes the place of dG K and dG^T K.
  dG = dG.astype(k_ref.dtype)
  dG += dG.T

  def over_keys(i, carry):
    erased, start_terms, end_terms, whole = carry

    # One accumulator per loop: three together spill.
    def product(rows_ref, columns_ref):
      def add(j, x):
        return x + dot(
          rows_ref[b, rows, h, values(j)], columns_ref[n, b, h, keys(i), values(j)], parts, NT
        )

      return lax.fori_loop(0, dv // block_v, add, jnp.zeros((chunk, block_k), F32))

    Q = q_ref[b, rows, hk, keys(i)]
    K = k_ref[b, rows, hk, keys(i)]
    dQ = scale_rows(product(do_ref, states_ref), decay.start) * scale
    if has_g:
      start_terms += jnp.sum(dQ * Q.astype(F32), axis=1)
    dq_ref[b, rows, h, keys(i)] = (dQ + dot(dP, K, parts)).astype(dq_ref.dtype)
    dK_end = scale_rows(product(R_ref, dstates_ref), decay.end)
    if has_g:
      end_terms += jnp.sum(dK_end * K.astype(F32), axis=1)
    dK = dK_end + dot(dP, Q, parts, TN)
    dK += dot(dG, K, parts)
    dK_start = -scale_rows(product(dY_ref, states_ref), decay.start)
    # -e^b K S in Z, seen from dY: its part of dbeta, and with beta of the gate's gradient.
    erased += jnp.sum(dK_start * K.astype(F32), axis=1)
    dk_ref[b, rows, h, keys(i)] = (dK + dK_start * beta[:, None]).astype(dk_ref.dtype)
    if has_g:

      def trace(j, whole):
        S = states_ref[n, b, h, keys(i), values(j)].astype(F32)
        return whole + jnp.sum(S * dstates_ref[n, b, h, keys(i), values(j)].astype(F32))

      whole = lax.fori_loop(0, dv // block_v, trace, whole)
    return erased, start_terms, end_terms, whole

  carry = (zeros, zeros, zeros, jnp.float32(0.0))
  erased, start_terms, end_terms, whole = lax.fori_loop(0, dk // block_k, over_keys, carry)
  dbeta_ref[b, rows, h] = dbeta + erased
  if has_g:
    start_terms += erased * beta
    dg_refs[0][b, rows, h] = dg + row_gates(start_terms, end_terms, whole * decay.whole, iotas)


def grads(
  q, k, v, beta, g, documents, P, R, dY, do, states, dstates, *, scale, tile=None, interpret=False
):
  """(dq, dk, dv, dbeta, dg) in the inputs' dtypes; dq and dk summed over a key's value heads."""
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  group = Hv // H
  tile = tile or tile_for("grads", k, full=g is not None or documents is not None)
  body = functools.partial(
    _grads_body,
    flags=(g is not None, documents is not None),
    group=group,
    scale=scale,
    chunk=P.shape[-1],
    block_k=min(tile.block_k, dk),
    block_v=min(tile.block_v, dv),
  )
  args = (q, k, v, beta, g, documents, P, R, dY, do, states, dstates)
  key_grads = jax.ShapeDtypeStruct((B, L, Hv, dk), k.dtype if group == 1 else F32)
  gates = jax.ShapeDtypeStruct((B, L, Hv), F32)
  out_shape = [key_grads, key_grads, jax.ShapeDtypeStruct(v.shape, v.dtype), gates]
  out_shape += [gates] if g is not None else []
  options = dict(grid=(P.shape[0], Hv, B), tile=tile, interpret=interpret)
  dq, dK, dV, dbeta, *dg = call("grads", body, args, out_shape, **options)
  if group > 1:
    dq, dK = (x.reshape(B, L, H, group, dk).sum(3).astype(k.dtype) for x in (dq, dK))
  return dq, dK, dV, dbeta.astype(beta.dtype), dg[0].astype(g.dtype) if dg else None
