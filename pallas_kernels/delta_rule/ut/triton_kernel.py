"""UT-transform kernel in Triton. Imports jax_triton and triton: import this module lazily."""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

from pallas_kernels.common.bf16 import PARTS, parts_for
from pallas_kernels.delta_rule.pallas_gpu.inverse import inverse_shape
from pallas_kernels.delta_rule.pallas_gpu.tiles import tile_for

F32 = jnp.float32


@triton.jit
def _dot(a, b, PARTS: tl.constexpr):
  """Return a b from 1, 2 or 3 bfloat16 parts of each, like `pallas_gpu.matmul.dot`."""
  a0 = a.to(tl.bfloat16)
  b0 = b.to(tl.bfloat16)
  out = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
  if PARTS > 1:
    ra = a.to(tl.float32) - a0.to(tl.float32)
    rb = b.to(tl.float32) - b0.to(tl.float32)
    a1 = ra.to(tl.bfloat16)
    b1 = rb.to(tl.bfloat16)
    if PARTS > 2:
      a2 = (ra - a1.to(tl.float32)).to(tl.bfloat16)
      b2 = (rb - b1.to(tl.float32)).to(tl.bfloat16)
      out = tl.dot(a2, b0, out)
      out = tl.dot(a0, b2, out)
      out = tl.dot(a1, b1, out)
    out = tl.dot(a1, b0, out)
    out = tl.dot(a0, b1, out)
  return tl.dot(a0, b0, out)


@triton.jit
def _gram(keys, C: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr):
  """Return K K^T and its rounding error, K [C, DK] float32, like `pallas_gpu.matmul.gram`."""
  columns = tl.arange(0, BLOCK_K)[None, :]
  largest = tl.zeros((C,), tl.float32)
  for d in range(0, DK, BLOCK_K):
    largest = tl.maximum(largest, tl.max(tl.abs(tl.load(keys + d + columns)), 1))
  shift = (largest * 131072.0)[:, None]  # 2^17
  exact = tl.zeros((C, C), tl.float32)
  half = tl.zeros((C, C), tl.float32)
  for d in range(0, DK, BLOCK_K):
    K = tl.load(keys + d + columns)
    coarse = (K + shift) - shift
    fine = K - coarse
    exact += _dot(coarse, tl.trans(coarse), 1)
    half += _dot(fine, tl.trans(coarse + 0.5 * fine), 3)
  small = half + tl.trans(half)
  G = exact + small
  return G, (exact - G) + small


@triton.jit
def _residual(eye, A, X):
  """Return I - (I + A) X, like `pallas_gpu.inverse.inverse_residual`."""
  A0, X0 = A.to(tl.bfloat16), X.to(tl.bfloat16)
  rA, rX = A - A0.to(tl.float32), X - X0.to(tl.float32)
  A1, X1 = rA.to(tl.bfloat16), rX.to(tl.bfloat16)
  A2, X2 = (rA - A1.to(tl.float32)).to(tl.bfloat16), (rX - X1.to(tl.float32)).to(tl.bfloat16)
  E = eye - X
  E -= tl.dot(A0, X0)
  E -= tl.dot(A0, X1)
  E -= tl.dot(A1, X0)
  E -= tl.dot(A0, X2)
  E -= tl.dot(A1, X1)
  E -= tl.dot(A2, X0)
  E -= tl.dot(A1, X2)
  return E - tl.dot(A2, X1)


@triton.jit
def _ut_kernel(
  k_ptr, v_ptr, beta_ptr, g_ptr, segments_ptr, X_ptr, W_ptr, U_ptr,
  HAS_G: tl.constexpr, HAS_SEGMENTS: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
  H: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
  LEVELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr,
  INVERSE: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
  n, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
  hk = h // (HV // H)
  i = tl.arange(0, C)
  token = b.to(tl.int64) * L + n * C + i
  out = (n.to(tl.int64) * B + b) * HV + h  # chunk number in [N B Hv]
  row, column = i[:, None], i[None, :]
  beta = tl.load(beta_ptr + token * HV + h).to(tl.float32)
  keep = row >= column
  row_scale = beta
  if HAS_SEGMENTS:
    segments = tl.load(segments_ptr + token)
    carried = tl.load(segments_ptr + b * L + tl.maximum(n * C - 1, 0))
    keep = keep & (segments[:, None] == segments[None, :])
    row_scale = tl.where(segments == carried, row_scale, 0.0)
  D = tl.where(keep, 1.0, 0.0)
  if HAS_G:
    # Two parts whose differences do not cancel: see `pallas_gpu.decay._log_decay`.
    g = tl.load(g_ptr + token * HV + h).to(tl.float32)
    g_coarse = tl.floor(g * 4096.0) * (1.0 / 4096)
    coarse = tl.cumsum(g_coarse, 0)
    fine = tl.cumsum(g - g_coarse, 0)
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    D = D * tl.exp(tl.where(keep, between, 0.0))
    row_scale = row_scale * tl.exp(coarse + fine)
  scores = tl.where(row > column, D * beta[:, None], 0.0)
  keys = k_ptr + (token[:, None] * H + hk) * DK
  if MATRICES == 1:
    G = tl.zeros((C, C), tl.float32)
    for d in range(0, DK, BLOCK_K):
      K = tl.load(keys + d + tl.arange(0, BLOCK_K)[None, :])
      G += _dot(K, tl.trans(K), PARTS)
  else:
    G, A_error = _gram(keys, C, DK, BLOCK_K)
    A_error *= scores
  A = G * scores
  eye = tl.where(row == column, 1.0, 0.0)
  if INVERSE == 0:
    X = eye
    for j in range(1, C):
      a = tl.sum(tl.where(row == j, A, 0.0), 0)
      X = tl.where(row == j, eye - tl.sum(a[:, None] * X, 0)[None, :], X)
  else:
    X = eye - tl.where((row ^ column) == 1, A, 0.0)
    for level in range(1, LEVELS):
      A_level = tl.where(((row ^ column) >> level) == 1, A, 0.0)
      X -= _dot(_dot(X, A_level, INVERSE), X, INVERSE)
  X_out = X_ptr + (out * MATRICES * C + row) * C + column
  tl.store(X_out, X.to(X_ptr.dtype.element_ty))
  if MATRICES > 1:
    residual = _dot(X, _residual(eye, A, X) - _dot(A_error, X, 2), 2)
    tl.store(X_out + C * C, residual)
  for d in range(0, DK, BLOCK_K):
    cols = d + tl.arange(0, BLOCK_K)[None, :]
    K = tl.load(keys + cols).to(tl.float32) * row_scale[:, None]
    W = _dot(X, K, PARTS)
    if MATRICES > 1:
      W += _dot(residual, K, 2)
    tl.store(W_ptr + (out * C + row) * DK + cols, W.to(W_ptr.dtype.element_ty))
  for d in range(0, DV, BLOCK_V):
    cols = d + tl.arange(0, BLOCK_V)[None, :]
    V = tl.load(v_ptr + (token[:, None] * HV + h) * DV + cols).to(tl.float32) * beta[:, None]
    U = _dot(X, V, PARTS)
    if MATRICES > 1:
      U += _dot(residual, V, 2)
    tl.store(U_ptr + (out * C + row) * DV + cols, U.to(U_ptr.dtype.element_ty))


def kernel_sizes(k, v, has_g, has_segments, tile, chunk, inverse_precision):
  """Return the compile-time arguments of `_ut_kernel`."""
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  return dict(
    HAS_G=has_g, HAS_SEGMENTS=has_segments, B=B, L=L, H=H, HV=Hv, DK=dk, DV=dv, C=chunk,
    LEVELS=chunk.bit_length() - 1, BLOCK_K=min(tile.block_k, dk), BLOCK_V=min(tile.block_v, dv),
    PARTS=parts_for(k.dtype), INVERSE=PARTS[inverse_precision], MATRICES=2 if k.dtype == F32 else 1,
  )  # fmt: skip


def ut_transform(
  k, v, beta, g=None, segments=None, *, chunk, inverse_precision, compute_capability=None
):
  """Return X = (I + A)^-1, W = X (beta e^b K), U = X (beta V), like `ut.pallas.ut_transform`."""
  B, L, _, dk = k.shape
  Hv, dv = v.shape[2:]
  N = L // chunk
  tile = tile_for("ut_triton", k)
  sizes = kernel_sizes(k, v, g is not None, segments is not None, tile, chunk, inverse_precision)
  unused = beta  # a pointer the kernel never reads
  return jax_triton.triton_call(
    k, v, beta, unused if g is None else g, unused if segments is None else segments,
    kernel=_ut_kernel,
    out_shape=[
      inverse_shape(N, B, Hv, chunk, k.dtype),
      *(jax.ShapeDtypeStruct((N, B, Hv, chunk, d), k.dtype) for d in (dk, dv)),
    ],
    grid=(N, Hv, B),
    num_warps=tile.warps,
    num_stages=tile.stages,
    compute_capability=compute_capability,
    **sizes,
  )  # fmt: skip
