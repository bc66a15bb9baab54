"""Matmuls of the TPU kernels: float32 operands are split into bfloat16 parts, K K^T is exact."""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.bf16 import bf16_parts

F32, BF16 = jnp.float32, jnp.bfloat16
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))  # a b, a b^T, a^T b


def matmul(a, b, dims=NN, parts=3, residual=None):
  """Return a b in float32: one bfloat16 pass for bfloat16 operands, six for float32.

  Three passes for float32 with parts=2. Two passes if only a is bfloat16: b is then exact to 16
  bits. `residual` holds digits of a float32 b below its last one.

  Splitting explicitly instead of with `Precision.HIGHEST`: interpret mode rounds like the chip, the
  sums of the leading parts are nearly exact, it takes fewer VLIW bundles, b can have a residual.
  """
  dot = functools.partial(
    lax.dot_general, dimension_numbers=(dims, ((), ())), preferred_element_type=F32
  )
  if a.dtype == BF16:
    return dot(a, b) if b.dtype == BF16 else sum(dot(a, x) for x in bf16_parts(b, 2)[::-1])
  a, b = bf16_parts(a, parts), bf16_parts(b, parts, residual)
  # Smallest terms first.
  return sum(dot(a[i], b[n - i]) for n in reversed(range(parts)) for i in range(n + 1))


def gram(K):
  """Return K K^T and, for float32, its rounding error (else None).

  Repeated keys have the same rounding error in every entry and chunk, and with beta = 2 nothing
  damps it: the error grows with the length, to 1e-4 after 4096 tokens.
  """
  if K.dtype != F32:
    return matmul(K, K, NT), None
  # Adding the shift rounds a row to at most 128 steps of a power of two: bfloat16 represents them,
  # and sums of up to 256 of their products are exact.
  shift = jnp.max(jnp.abs(K), axis=1, keepdims=True) * 2.0**17
  coarse = (K + shift) - shift
  fine = K - coarse
  half = matmul(fine, coarse + 0.5 * fine, NT)
  small = half + half.T
  exact = matmul(coarse.astype(BF16), coarse.astype(BF16), NT)
  KK = exact + small
  return KK, (exact - KK) + small
