"""The UT-transform kernel in Triton proper; imports jax_triton and triton, so import it lazily."""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl

F32 = jnp.float32


@triton.jit
def _dot(a, b, PASSES: tl.constexpr):
  """a b out of 1, 3 or 6 bf16 products, as triton_gpu_ut.dot."""
  a0 = a.to(tl.bfloat16)
  b0 = b.to(tl.bfloat16)
  out = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
  if PASSES > 1:
    ra = a.to(tl.float32) - a0.to(tl.float32)
    rb = b.to(tl.float32) - b0.to(tl.float32)
    a1 = ra.to(tl.bfloat16)
    b1 = rb.to(tl.bfloat16)
    if PASSES > 3:
      a2 = (ra - a1.to(tl.float32)).to(tl.bfloat16)
      b2 = (rb - b1.to(tl.float32)).to(tl.bfloat16)
      out = tl.dot(a2, b0, out)
      out = tl.dot(a0, b2, out)
      out = tl.dot(a1, b1, out)
    out = tl.dot(a1, b0, out)
    out = tl.dot(a0, b1, out)
  return tl.dot(a0, b0, out)


@triton.jit
def _ut_kernel(
  k_ptr, v_ptr, beta_ptr, g_ptr, seg_ptr, X_ptr, W_ptr, U_ptr,
  HAS_G: tl.constexpr, HAS_SEG: tl.constexpr, B: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
  HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
  BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PASSES: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
  n, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
  hk = h // (HV // H)
  i = tl.arange(0, C)
  token = b.to(tl.int64) * L + n * C + i
  out = (n.to(tl.int64) * B + b) * HV + h  # chunk number in [N B Hv]
  row, column = i[:, None], i[None, :]
  beta = tl.load(beta_ptr + token * HV + h).to(tl.float32)
  keep = row >= column
  erase = beta
  if HAS_SEG:
    seg = tl.load(seg_ptr + token)
    carried = tl.load(seg_ptr + b * L + tl.maximum(n * C - 1, 0))
    keep = keep & (seg[:, None] == seg[None, :])
    erase = tl.where(seg == carried, erase, 0.0)
  inside = tl.where(keep, 1.0, 0.0)
  if HAS_G:
    # Two parts whose differences do not cancel: see triton_gpu_ut._log_decay.
    g = tl.load(g_ptr + token * HV + h).to(tl.float32)
    g_coarse = tl.floor(g * 4096.0) * (1.0 / 4096)
    coarse = tl.cumsum(g_coarse, 0)
    fine = tl.cumsum(g - g_coarse, 0)
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    inside = inside * tl.exp(tl.where(keep, between, 0.0))
    erase = erase * tl.exp(coarse + fine)
  G = tl.zeros((C, C), tl.float32)
  for d in range(0, DK, BLOCK_K):
    cols = d + tl.arange(0, BLOCK_K)[None, :]
    K = tl.load(k_ptr + (token[:, None] * H + hk) * DK + cols)
    G += _dot(K, tl.trans(K), PASSES)
  A = tl.where(row > column, G * inside * beta[:, None], 0.0)
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
  tl.store(X_ptr + (out * C + row) * C + column, X.to(X_ptr.dtype.element_ty))
  for d in range(0, DK, BLOCK_K):
    cols = d + tl.arange(0, BLOCK_K)[None, :]
    K = tl.load(k_ptr + (token[:, None] * H + hk) * DK + cols).to(tl.float32)
    W = _dot(X, K * erase[:, None], PASSES)
    tl.store(W_ptr + (out * C + row) * DK + cols, W.to(W_ptr.dtype.element_ty))
  for d in range(0, DV, BLOCK_V):
    cols = d + tl.arange(0, BLOCK_V)[None, :]
    V = tl.load(v_ptr + (token[:, None] * HV + h) * DV + cols).to(tl.float32)
    U = _dot(X, V * beta[:, None], PASSES)
    tl.store(U_ptr + (out * C + row) * DV + cols, U.to(U_ptr.dtype.element_ty))


def kernel_sizes(k_shape, v_shape, is_float32, has_g, has_seg, chunk, inverse_precision):
  """Compile-time arguments of _ut_kernel."""
  B, L, H, dk = k_shape
  Hv, dv = v_shape[2:]
  inverse = {"substitution": 0, "bf16": 1, "bf16x3": 3, "bf16x6": 6}[inverse_precision]
  return dict(
    HAS_G=has_g, HAS_SEG=has_seg, B=B, L=L, H=H, HV=Hv, DK=dk, DV=dv, C=chunk,
    LEVELS=chunk.bit_length() - 1, BLOCK_K=min(64, dk), BLOCK_V=min(64, dv),
    PASSES=6 if is_float32 else 1, INVERSE=inverse,
  )  # fmt: skip


def ut_transform(
  k, v, beta, g=None, seg=None, *, chunk, inverse_precision, compute_capability=None
):
  """X = (I + A)^-1, W = X (beta e^b K), U = X (beta V): as triton_gpu_ut.ut_transform."""
  B, L, _, dk = k.shape
  Hv, dv = v.shape[2:]
  N = L // chunk
  is_float32 = k.dtype == F32
  sizes = kernel_sizes(
    k.shape, v.shape, is_float32, g is not None, seg is not None, chunk, inverse_precision
  )
  unused = beta  # a pointer the kernel never reads
  return jax_triton.triton_call(
    k, v, beta, unused if g is None else g, unused if seg is None else seg,
    kernel=_ut_kernel,
    out_shape=[jax.ShapeDtypeStruct((N, B, Hv, chunk, d), k.dtype) for d in (chunk, dk, dv)],
    grid=(N, Hv, B),
    num_warps=4,
    num_stages=1,
    compute_capability=compute_capability,
    **sizes,
  )  # fmt: skip
