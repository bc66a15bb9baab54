"""Products of the GPU kernels: float32 factors are split by hand, and K K^T keeps what it loses."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import bf16_parts, parts_for

F32, BF16 = jnp.float32, jnp.bfloat16
NN = (((1,), (0,)), ((), ()))  # a b
NT = (((1,), (1,)), ((), ()))  # a b^T
TN = (((0,), (0,)), ((), ()))  # a^T b


def split(x, parts, rest=None):
  """The bfloat16 parts of x, which is its own if it is bfloat16."""
  return [x] if x.dtype == BF16 else bf16_parts(x, parts, rest)


def dot(a, b, parts, dims=NN, rest=None):
  """a b in float32 from 1, 2 or 3 bfloat16 parts of each; a bfloat16 operand is exact as it is.

  Split by hand so that the rounding is the same in interpret mode as on the GPU. `rest` has digits
  of b below its last.
  """
  a_parts, b_parts = split(a, parts), split(b, parts, rest)
  pairs = [(i, j) for i in range(len(a_parts)) for j in range(len(b_parts)) if i + j < parts]
  out = None
  for i, j in sorted(pairs, key=sum, reverse=True):  # smallest terms first
    term = lax.dot_general(a_parts[i], b_parts[j], dims, preferred_element_type=F32)
    out = term if out is None else out + term
  return out


def gram(k_ref, b, rows, h, block):
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
    return exact, sums[1] + dot(fine, coarse + 0.5 * fine, parts_for(F32), NT)

  exact, half = lax.fori_loop(0, count, over_products, (square, square))
  small = half + half.T
  G = exact + small
  return G, (exact - G) + small
