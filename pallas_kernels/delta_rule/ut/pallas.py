"""Intra-chunk UT transform for NVIDIA GPUs (Pallas, Triton lowering), forward and backward.

`intra` is the same without W and U, with the scores: what the fused kernels need of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.delta_rule.triton_gpu_chunk import (
  BF16,
  F32,
  FLOAT32_PASSES,
  NT,
  TN,
  call,
  dot,
  load_chunk,
  load_inverse,
  passes_for,
  pick,
  program_ids,
  residual,
  row_gates,
  score_gates,
  strict_lower,
  times_inverse,
  unit_lower_inverse,
)
from pallas_kernels.delta_rule.triton_gpu_tiles import tile_for


def _gram(k_ref, b, rows, h, block):
  """K K^T and, for float32, what rounding it to float32 took away (else None).

  Repeated keys lose the same digits in every entry and chunk, and with beta = 2 nothing damps them:
  the error grows with the length, to 1e-4 after 4096 tokens.
  """
  block = min(block, k_ref.shape[-1])
  count = k_ref.shape[-1] // block
  load = lambda i: k_ref[b, rows, h, pl.ds(i * block, block)]
  chunk = rows.size
  square = jnp.zeros((chunk, chunk), F32)
  if k_ref.dtype != F32:
    return lax.fori_loop(0, count, lambda i, G: G + dot(load(i), load(i), 1, NT), square), None

  def over_columns(i, largest):
    return jnp.maximum(largest, jnp.max(jnp.abs(load(i)), axis=1))

  # Adding the shift rounds a row to at most 128 steps of a power of two: bfloat16 holds them, and
  # sums of up to 256 of their products are exact.
  largest = lax.fori_loop(0, count, over_columns, jnp.zeros((chunk,), F32))
  shift = (largest * 2.0**17)[:, None]

  def over_products(i, sums):
    K = load(i)
    coarse = (K + shift) - shift
    fine = K - coarse
    coarse_bf16 = coarse.astype(BF16)
    exact = sums[0] + dot(coarse_bf16, coarse_bf16, 1, NT)
    return exact, sums[1] + dot(fine, coarse + 0.5 * fine, FLOAT32_PASSES, NT)

  exact, half = lax.fori_loop(0, count, over_products, (square, square))
  small = half + half.T
  G = exact + small
  return G, (exact - G) + small


def _store_inverse(X_ref, at, gram, scores, precision, iotas, zero):
  """Writes X = (I + A)^-1 to X_ref [at, 0], and a rest below its last digit to [at, 1] if asked.

  Returns what `times_inverse` takes. Added to X, the rest would be rounded away.
  """
  A, missing = (None if G is None else strict_lower(G * scores, iotas) for G in gram)
  X = [unit_lower_inverse(A, precision, iotas, zero)]
  if missing is not None:
    # A step of Newton's method, towards (I + A + missing)^-1.
    E = residual(A, X[0], iotas) - dot(missing, X[0], 3)
    X.append(dot(X[0], E, 3))
  for i, x in enumerate(X):
    X_ref[*at, i, :, :] = x.astype(X_ref.dtype)
  return X


def inverse_shape(N, B, Hv, chunk, dtype):
  """[N B Hv parts C C]: X, and for float32 its rest."""
  return jax.ShapeDtypeStruct((N, B, Hv, 2 if dtype == F32 else 1, chunk, chunk), dtype)


def _blocks(size, block):
  block = min(size, block)
  return [pl.ds(i, block) for i in range(0, size, block)]


def _forward_body(k_ref, v_ref, beta_ref, *refs, has_g, has_seg, group, chunk, tile, precision):
  # k [B L H dk], v [B L Hv dv], beta [B L Hv] -> X [N B Hv C C], W [N B Hv C dk], U [N B Hv C dv]
  g_ref, seg_ref, (X_ref, W_ref, U_ref) = pick(refs, has_g, has_seg)
  n, h, b, hk = program_ids(group)
  passes = passes_for(k_ref.dtype)
  rows, beta, zero, iotas, decay = load_chunk(beta_ref, g_ref, seg_ref, n, b, h, chunk)
  key_blocks = _blocks(k_ref.shape[-1], tile.block_k)
  gram = _gram(k_ref, b, rows, hk, tile.block_k)
  scores = decay.inside() * beta[:, None]
  X = _store_inverse(X_ref, (n, b, h), gram, scores, precision, iotas, zero)
  row_scale = beta if decay.start is None else beta * decay.start
  for cols in key_blocks:
    K = k_ref[b, rows, hk, cols].astype(F32) * row_scale[:, None]
    W_ref[n, b, h, :, cols] = times_inverse(X, K, passes).astype(W_ref.dtype)
  for cols in _blocks(v_ref.shape[-1], tile.block_v):
    V = v_ref[b, rows, h, cols].astype(F32) * beta[:, None]
    U_ref[n, b, h, :, cols] = times_inverse(X, V, passes).astype(U_ref.dtype)


def _intra_body(q_ref, k_ref, beta_ref, *refs, has_g, has_seg, group, scale, block_k, precision):
  # -> P = scale QK^T with masks and decays [N B Hv C C], and X likewise unless precision is None
  g_ref, seg_ref, (P_ref, *X_refs) = pick(refs, has_g, has_seg)
  chunk = P_ref.shape[-1]
  n, h, b, hk = program_ids(group)
  passes = passes_for(k_ref.dtype)
  rows, beta, zero, iotas, decay = load_chunk(beta_ref, g_ref, seg_ref, n, b, h, chunk)
  for X_ref in X_refs:
    gram = _gram(k_ref, b, rows, hk, block_k)
    scores = decay.inside() * beta[:, None]
    _store_inverse(X_ref, (n, b, h), gram, scores, precision, iotas, zero)

  def over_keys(i, P):
    cols = pl.ds(i * block_k, block_k)
    return P + dot(q_ref[b, rows, hk, cols], k_ref[b, rows, hk, cols], passes, NT)

  P = jnp.zeros((chunk, chunk), F32)
  P = lax.fori_loop(0, k_ref.shape[-1] // block_k, over_keys, P)
  P_ref[n, b, h, :, :] = (P * decay.inside() * scale).astype(P_ref.dtype)


def _backward_body(k_ref, v_ref, beta_ref, *refs, has_g, has_seg, group, chunk, tile):
  # X, W, U, dW, dU [N B Hv C .] -> dk [B L Hv dk], dv [B L Hv dv], dbeta, dg [B L Hv]
  g_ref, seg_ref, refs = pick(refs, has_g, has_seg)
  X_ref, W_ref, U_ref, dW_ref, dU_ref, dk_ref, dv_ref, dbeta_ref = refs[:8]
  n, h, b, hk = program_ids(group)
  passes = passes_for(k_ref.dtype)
  rows, beta, _, iotas, decay = load_chunk(beta_ref, g_ref, seg_ref, n, b, h, chunk)
  zeros = jnp.zeros((chunk,), F32)
  square = jnp.zeros((chunk, chunk), F32)
  block_k, block_v = min(tile.block_k, k_ref.shape[-1]), min(tile.block_v, v_ref.shape[-1])
  key_count = k_ref.shape[-1] // block_k
  X = lambda: load_inverse(X_ref, (n, b, h))

  # Loops, not unrolled blocks: fewer addresses and product descriptors live at once.
  def over_values(i, carry):
    dA, dbeta = carry
    cols = pl.ds(i * block_v, block_v)
    dY = times_inverse(X(), dU_ref[n, b, h, :, cols], passes, TN)
    dA -= dot(dY, U_ref[n, b, h, :, cols], passes, NT)
    dv_ref[b, rows, h, cols] = (dY * beta[:, None]).astype(dv_ref.dtype)
    return dA, dbeta + jnp.sum(dY * v_ref[b, rows, h, cols].astype(F32), axis=1)

  def over_erase(i, carry):
    dA, erase = carry
    cols = pl.ds(i * block_k, block_k)
    dY = times_inverse(X(), dW_ref[n, b, h, :, cols], passes, TN)
    dA -= dot(dY, W_ref[n, b, h, :, cols], passes, NT)
    return dA, erase + jnp.sum(dY * k_ref[b, rows, hk, cols].astype(F32), axis=1)

  def over_gram(i, G):
    K = k_ref[b, rows, hk, pl.ds(i * block_k, block_k)]
    return G + dot(K, K, passes, NT)

  dA, dbeta = lax.fori_loop(0, v_ref.shape[-1] // block_v, over_values, (square, zeros))
  dA, erase = lax.fori_loop(0, key_count, over_erase, (dA, zeros))
  erase = erase if decay.start is None else erase * decay.start
  dA = strict_lower(dA * decay.inside(), iotas)
  G = lax.fori_loop(0, key_count, over_gram, square)
  dbeta_ref[b, rows, h] = dbeta + erase + jnp.sum(dA * G, axis=1)
  dG = dA * beta[:, None]
  if has_g:
    dg = row_gates(erase * beta, None, None, iotas) + score_gates(dG * G, passes, iotas)
    refs[8][b, rows, h] = dg
  dG = dG.astype(k_ref.dtype)
  row_scale = beta if decay.start is None else beta * decay.start

  def over_keys(i, _):
    cols = pl.ds(i * block_k, block_k)
    K = k_ref[b, rows, hk, cols]
    # X^T dW again rather than kept: one product against C dk live registers.
    dK = times_inverse(X(), dW_ref[n, b, h, :, cols], passes, TN) * row_scale[:, None]
    dK += dot(dG, K, passes) + dot(dG, K, passes, TN)
    dk_ref[b, rows, h, cols] = dK.astype(dk_ref.dtype)

  lax.fori_loop(0, key_count, over_keys, None)


def ut_transform(
  k, v, beta, g=None, seg=None, *, chunk, inverse_precision, tile=None, interpret=False
):
  """X = (I + A)^-1, W = X (beta e^b K), U = X (beta V) of every chunk, as [N B Hv C .].

  X has an axis before its last two: for float32 it is the sum of two parts.
  seg [B L] counts the segments seen so far (0 at the first token); L is a multiple of chunk and
  the head sizes are powers of two of at least 16. Outputs have k's dtype.
  """
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  N = L // chunk
  tile = tile or tile_for("ut_fwd", k)
  body = functools.partial(
    _forward_body,
    has_g=g is not None,
    has_seg=seg is not None,
    group=Hv // H,
    chunk=chunk,
    tile=tile,
    precision=inverse_precision,
  )
  out_shape = [
    inverse_shape(N, B, Hv, chunk, k.dtype),
    *(jax.ShapeDtypeStruct((N, B, Hv, chunk, d), k.dtype) for d in (dk, dv)),
  ]
  options = dict(grid=(N, Hv, B), tile=tile, interpret=interpret)
  return call("ut_fwd", body, (k, v, beta, g, seg), out_shape, **options)


def ut_transform_bwd(k, v, beta, g, seg, X, W, U, dW, dU, *, chunk, tile=None, interpret=False):
  """Gradients (dk, dv, dbeta, dg) of ut_transform; dk is summed over the value heads of a key."""
  B, L, H, dk = k.shape
  Hv = v.shape[2]
  group = Hv // H
  tile = tile or tile_for("ut_bwd", k)
  body = functools.partial(
    _backward_body,
    has_g=g is not None,
    has_seg=seg is not None,
    group=group,
    chunk=chunk,
    tile=tile,
  )
  gates = jax.ShapeDtypeStruct((B, L, Hv), F32)
  out_shape = [
    jax.ShapeDtypeStruct((B, L, Hv, dk), k.dtype if group == 1 else F32),
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    gates,
  ] + ([gates] if g is not None else [])
  args = (k, v, beta, g, seg, X, W, U, dW, dU)
  options = dict(grid=(L // chunk, Hv, B), tile=tile, interpret=interpret)
  dk_heads, dV, dbeta, *dg = call("ut_bwd", body, args, out_shape, **options)
  dK = dk_heads.reshape(B, L, H, group, dk).sum(3).astype(k.dtype) if group > 1 else dk_heads
  dg = dg[0].astype(g.dtype) if g is not None else None
  return dK, dV, dbeta.astype(beta.dtype), dg


def intra(q, k, beta, g, seg, *, scale, chunk, inverse_precision, tile=None, interpret=False):
  """[P, X] of every chunk in k's dtype; [P] alone if inverse_precision is None.

  P is [N B Hv C C]; X has an axis before its last two: for float32 it is the sum of two parts.
  """
  B, L, H, dk = k.shape
  Hv = beta.shape[2]
  kernel = "scores" if inverse_precision is None else "intra"
  tile = tile or tile_for(kernel, k)
  body = functools.partial(
    _intra_body,
    has_g=g is not None,
    has_seg=seg is not None,
    group=Hv // H,
    scale=scale,
    block_k=min(tile.block_k, dk),
    precision=inverse_precision,
  )
  out_shape = [jax.ShapeDtypeStruct((L // chunk, B, Hv, chunk, chunk), k.dtype)]
  if inverse_precision is not None:
    out_shape.append(inverse_shape(L // chunk, B, Hv, chunk, k.dtype))
  options = dict(grid=(L // chunk, Hv, B), tile=tile, interpret=interpret)
  return call(kernel, body, (q, k, beta, g, seg), out_shape, **options)
