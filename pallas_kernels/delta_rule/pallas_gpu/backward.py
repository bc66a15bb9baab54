"""Fused delta rule backward for NVIDIA GPUs: three kernels; and that of linear attention.

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


def _states_body(k_ref, v_ref, *refs, given, group, chunk, block_k, block_v):
  # k [B L H dk], v [B L Hv dv], beta [B L Hv]?, X [N B Hv matrices C C]?, g [B L Hv]?,
  # documents [B L]?, S0 [B Hv dk dv]? -> states [N B Hv dk dv], with an X also R [B L Hv dv]
  beta_ref, X_ref, g_ref, documents_ref, refs = pick(refs, *given)
  R_ref = refs.pop() if X_ref is not None else None
  states_ref = refs.pop()
  j, h, b, hk = program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  parts = parts_for(k_ref.dtype)

  def step(n, S):
    rows, beta, _, _, decay = load_chunk(k_ref, beta_ref, g_ref, documents_ref, n, b, h, hk, chunk)
    K = load_keys(k_ref, (b, rows, hk), key_blocks)
    KS = 0.0
    if X_ref is not None:
      for i, S_i in enumerate(S):
        KS += dot(K(i), S_i, parts)
    R, rest = writes(v_ref[b, rows, h, cols], KS, beta, decay, X_ref, (n, b, h), parts)
    if X_ref is not None:
      R_ref[b, rows, h, cols] = R.astype(R_ref.dtype)
    for S_i, keys in zip(S, key_blocks):
      states_ref[n, b, h, keys, cols] = S_i.astype(states_ref.dtype)
    return next_state(S, K, R, rest, decay, parts)

  S = first_state(refs, b, h, key_blocks, cols)
  lax.fori_loop(0, k_ref.shape[1] // chunk, step, S)


def states(k, v, beta, X, g, documents, S0, *, chunk, tile=None, interpret=False):
  """The state before each chunk [N B Hv dk dv] and, with an X, R [B L Hv dv], both in k's dtype.

  The backward's products round both to k's dtype anyway, so bfloat16 inputs lose nothing by it.
  """
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  tile = tile or tile_for("states", k, erases=X is not None)
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    _states_body,
    given=[x is not None for x in (beta, X, g, documents)],
    group=Hv // H,
    chunk=chunk,
    block_k=min(tile.block_k, dk),
    block_v=block_v,
  )
  out_shape = [jax.ShapeDtypeStruct((L // chunk, B, Hv, dk, dv), k.dtype)]
  if X is not None:
    out_shape.append(jax.ShapeDtypeStruct(v.shape, k.dtype))
  options = dict(grid=(dv // block_v, Hv, B), tile=tile, interpret=interpret, erases=X is not None)
  return call("states", body, (k, v, beta, X, g, documents, S0), out_shape, **options)


def _dstates_body(
  q_ref, k_ref, P_ref, do_ref, dS_ref, *refs, given, group, scale, block_k, block_v
):
  # P [N B Hv C C], do [B L Hv dv], dS [B Hv dk dv], beta?, X [N B Hv matrices C C]?
  # -> dY [B L Hv dv], dstates [N B Hv dk dv] (of the state after each chunk), dS0 [B Hv dk dv]
  beta_ref, X_ref, g_ref, documents_ref, refs = pick(refs, *given)
  dY_ref, dstates_ref, dS0_ref = refs
  j, h, b, hk = program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  parts = parts_for(k_ref.dtype)
  chunk = P_ref.shape[-1]
  chunks = k_ref.shape[1] // chunk

  def step(done, dS):
    n = chunks - 1 - done
    rows, beta, _, _, decay = load_chunk(k_ref, beta_ref, g_ref, documents_ref, n, b, h, hk, chunk)
    K = load_keys(k_ref, (b, rows, hk), key_blocks)
    KdS = 0.0
    for i, dS_i in enumerate(dS):
      KdS += dot(K(i), dS_i, parts)
      dstates_ref[n, b, h, key_blocks[i], cols] = dS_i.astype(dstates_ref.dtype)
    dO = do_ref[b, rows, h, cols]
    dY = dot(P_ref[n, b, h, :, :], dO, parts, TN) + scale_rows(KdS, decay.end)
    if X_ref is not None:
      dY, rest = times_inverse_split(load_inverse(X_ref, (n, b, h)), dY, parts, TN)
      dZ, rest = (scale_rows(scale_rows(x, beta), decay.start) for x in (dY, rest))
    dY_ref[b, rows, h, cols] = dY.astype(dY_ref.dtype)
    dO = scale_rows(dO.astype(F32), decay.start) * scale
    new = []
    for i, dS_i in enumerate(dS):
      kept = dS_i if decay.whole is None else dS_i * decay.whole
      kept += dot(q_ref[b, rows, hk, key_blocks[i]], dO, parts, TN)
      new.append(kept if X_ref is None else kept - dot(K(i), dZ, parts, TN, rest))
    return tuple(new)

  dS = tuple(dS_ref[b, h, keys, cols] for keys in key_blocks)
  dS = lax.fori_loop(0, chunks, step, dS)
  for dS_i, keys in zip(dS, key_blocks):
    dS0_ref[b, h, keys, cols] = dS_i


def dstates(q, k, v, beta, X, P, g, documents, do, dS, *, scale, tile=None, interpret=False):
  """dY = X^T dR [B L Hv dv], d(state after each chunk) [N B Hv dk dv] in k's dtype, and dS0.

  Of linear attention, without an X, dR alone, which is dv.
  """
  B, _, H, dk = k.shape
  Hv, dv = v.shape[2:]
  full, erases = g is not None or documents is not None, X is not None
  tile = tile or tile_for("dstates", k, full=full, erases=erases)
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    _dstates_body,
    given=[x is not None for x in (beta, X, g, documents)],
    group=Hv // H,
    scale=scale,
    block_k=min(tile.block_k, dk),
    block_v=block_v,
  )
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, k.dtype),
    jax.ShapeDtypeStruct((P.shape[0], B, Hv, dk, dv), k.dtype),
    jax.ShapeDtypeStruct((B, Hv, dk, dv), F32),
  ]
  options = dict(grid=(dv // block_v, Hv, B), tile=tile, interpret=interpret, erases=X is not None)
  return call("dstates", body, (q, k, P, do, dS, beta, X, g, documents), out_shape, **options)


def _grads_body(
  q_ref, k_ref, v_ref, P_ref, do_ref, states_ref, dstates_ref, *refs,
  given, group, scale, chunk, block_k, block_v,
):  # fmt: skip
  # P [N B Hv C C], do [B L Hv dv], states, dstates [N B Hv dk dv]; beta, R, dY of the delta rule
  # -> dq, dk [B L Hv dk], of the delta rule dv [B L Hv dv] and dbeta [B L Hv], dg? [B L Hv]
  beta_ref, R_ref, dY_ref, g_ref, documents_ref, refs = pick(refs, *given)
  dq_ref, dk_ref, *refs = refs
  erases, has_g = beta_ref is not None, g_ref is not None
  R_ref = R_ref if erases else v_ref
  dv_ref, dbeta_ref, dg_refs = pick(refs, erases, erases)
  n, h, b, hk = program_ids(group)
  dk, dv = k_ref.shape[-1], v_ref.shape[-1]
  parts = parts_for(k_ref.dtype)
  rows, beta, _, iotas, decay = load_chunk(
    k_ref, beta_ref, g_ref, documents_ref, n, b, h, hk, chunk
  )
  zeros = jnp.zeros((chunk,), F32)

  def keys(i):
    return pl.ds(i * block_k, block_k)

  def values(j):
    return pl.ds(j * block_v, block_v)

  def over_values(j, carry):
    dP, dA, dbeta = carry
    cols = values(j)
    R = R_ref[b, rows, h, cols]
    dP += dot(do_ref[b, rows, h, cols], R, parts, NT)
    if not erases:
      return dP, dA, dbeta
    dY = dY_ref[b, rows, h, cols]
    dA -= dot(dY, R, parts, NT)
    dY = dY.astype(F32)
    dv_ref[b, rows, h, cols] = (dY * beta[:, None]).astype(dv_ref.dtype)
    return dP, dA, dbeta + jnp.sum(dY * v_ref[b, rows, h, cols].astype(F32), axis=1)

  square = jnp.zeros((chunk, chunk), F32)
  carry = (square, square if erases else None, zeros if erases else None)
  dP, dA, dbeta = lax.fori_loop(0, dv // block_v, over_values, carry)

  def over_gram(i, G):
    K = k_ref[b, rows, hk, keys(i)]
    return G + dot(K, K, parts, NT)

  M = dP * P_ref[n, b, h, :, :].astype(F32) if has_g else None
  # From here on dP, dA and dG are gradients of Q K^T and K K^T before masks and decays.
  inside = decay.inside()
  dP = (dP * inside * scale).astype(k_ref.dtype)
  if erases:
    dA = strict_lower(dA * inside, iotas)
    G = lax.fori_loop(0, dk // block_k, over_gram, square)
    dbeta += jnp.sum(dA * G, axis=1)
    dG = dA * beta[:, None]
    M = M + dG * G if has_g else None
    # Strictly lower, so that the sum is exact: one product takes the place of dG K and dG^T K.
    dG = dG.astype(k_ref.dtype)
    dG += dG.T
  if has_g:
    dg = score_gates(M, parts, iotas)

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
    if erases:
      dK += dot(dG, K, parts)
      dK_start = -scale_rows(product(dY_ref, states_ref), decay.start)
      # -e^b K S in Z, seen from dY: its part of dbeta, and with beta of the gate's gradient.
      erased += jnp.sum(dK_start * K.astype(F32), axis=1)
      dK += dK_start * beta[:, None]
    dk_ref[b, rows, h, keys(i)] = dK.astype(dk_ref.dtype)
    if has_g:

      def trace(j, whole):
        S = states_ref[n, b, h, keys(i), values(j)].astype(F32)
        return whole + jnp.sum(S * dstates_ref[n, b, h, keys(i), values(j)].astype(F32))

      whole = lax.fori_loop(0, dv // block_v, trace, whole)
    return erased, start_terms, end_terms, whole

  carry = (zeros, zeros, zeros, jnp.float32(0.0))
  erased, start_terms, end_terms, whole = lax.fori_loop(0, dk // block_k, over_keys, carry)
  if erases:
    dbeta_ref[b, rows, h] = dbeta + erased
    start_terms += erased * beta
  if has_g:
    dg_refs[0][b, rows, h] = dg + row_gates(start_terms, end_terms, whole * decay.whole, iotas)


def grads(
  q, k, v, beta, g, documents, P, R, dY, do, states, dstates, *, scale, tile=None, interpret=False
):
  """(dq, dk, dv, dbeta, dg) in the inputs' dtypes; dq and dk summed over a key's value heads.

  Of linear attention, beta None, there is no dbeta, and dv is what `dstates` calls dY.
  """
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  group = Hv // H
  full, erases = g is not None or documents is not None, beta is not None
  tile = tile or tile_for("grads", k, full=full, erases=erases)
  body = functools.partial(
    _grads_body,
    given=[x is not None for x in (beta, R, dY, g, documents)],
    group=group,
    scale=scale,
    chunk=P.shape[-1],
    block_k=min(tile.block_k, dk),
    block_v=min(tile.block_v, dv),
  )
  args = (q, k, v, P, do, states, dstates, beta, R, dY, g, documents)
  key_grads = jax.ShapeDtypeStruct((B, L, Hv, dk), k.dtype if group == 1 else F32)
  gates = jax.ShapeDtypeStruct((B, L, Hv), F32)
  out_shape = [key_grads, key_grads]
  if beta is not None:
    out_shape += [jax.ShapeDtypeStruct(v.shape, v.dtype), gates]
  out_shape += [gates] if g is not None else []
  options = dict(grid=(P.shape[0], Hv, B), tile=tile, interpret=interpret, erases=erases)
  dq, dK, *rest = call("grads", body, args, out_shape, **options)
  dV, dbeta, dg = pick(rest, erases, erases)
  if group > 1:
    dq, dK = (x.reshape(B, L, H, group, dk).sum(3).astype(k.dtype) for x in (dq, dK))
  dbeta = dbeta.astype(beta.dtype) if erases else None
  return dq, dK, dV, dbeta, dg[0].astype(g.dtype) if dg else None
