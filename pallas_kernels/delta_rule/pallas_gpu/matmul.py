"""Matmuls of the GPU kernels: float32 operands are split into bfloat16 parts, K K^T is exact."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import bf16_parts, parts_for

F32, BF16 = jnp.float32, jnp.bfloat16
NN = (((1,), (0,)), ((), ()))  # a b
NT = (((1,), (1,)), ((), ()))  # a b^T
TN = (((0,), (0,)), ((), ()))  # a^T b


def split(x, parts, residual=None):
  """Return the bfloat16 parts of x; a bfloat16 x is its only part."""
  return [x] if x.dtype == BF16 else bf16_parts(x, parts, residual)


def dot(a, b, parts, dims=NN, residual=None):
  """Return a b in float32 from 1, 2 or 3 bfloat16 parts of each; bfloat16 operands are exact.

  Splitting explicitly makes the rounding in interpret mode the same as on the GPU. `residual` holds
  digits of b below its last one.
  """
  a_parts, b_parts = split(a, parts), split(b, parts, residual)
  pairs = [(i, j) for i in range(len(a_parts)) for j in range(len(b_parts)) if i + j < parts]
  out = None
  for i, j in sorted(pairs, key=sum, reverse=True):  # smallest terms first
    term = lax.dot_general(a_parts[i], b_parts[j], dims, preferred_element_type=F32)
    out = term if out is None else out + term
  return out


def gram(k_ref, b, rows, h, block):
  """Return K K^T and, for float32, its rounding error (else None).

  Repeated keys have the same rounding error in every entry and chunk, and with beta = 2 nothing
  damps it: the error grows with the length, to 1e-4 after 4096 tokens.
  """
  block = min(block, k_ref.shape[-1])
  count = k_ref.shape[-1] // block
  load = lambda i: k_ref[b, rows, h, pl.ds(i * block, block)]
  chunk = rows.size
  square = jnp.zeros((chunk, chunk), F32)
  if k_ref.dtype != F32:
    return lax.fori_loop(0, count, lambda i, KK: KK + dot(load(i), load(i), 1, NT), square), None

  def over_columns(i, largest):
    return jnp.maximum(largest, jnp.max(jnp.abs(load(i)), axis=1))

  # Adding the shift rounds a row to at most 128 steps of a power of two: bfloat16 represents them,
  # and sums of up to 256 of their products are exact.
  largest = lax.fori_loop(0, count, over_columns, jnp.zeros((chunk,), F32))
  shift = (largest * 2.0**17)[:, None]

  def over_matmuls(i, sums):
    K = load(i)
    coarse = (K + shift) - shift
    fine = K - coarse
    coarse_bf16 = coarse.astype(BF16)
    exact = sums[0] + dot(coarse_bf16, coarse_bf16, 1, NT)
    return exact, sums[1] + dot(fine, coarse + 0.5 * fine, parts_for(F32), NT)

  exact, half = lax.fori_loop(0, count, over_matmuls, (square, square))
  small = half + half.T
  KK = exact + small
  return KK, (exact - KK) + small
