"""X = (I + A)^-1 on TPU: forward substitution in small blocks, block merges, matmuls with X."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.bf16 import PARTS, bf16_parts
from pallas_kernels.delta_rule.pallas_tpu.matmul import BF16, NN, matmul


def residual(A, X):
  """Return I - (I + A) X, largest terms first: single-part matmuls cancel almost exactly."""
  row, column = (lax.broadcasted_iota(jnp.int32, A.shape, axis) for axis in (0, 1))
  E = jnp.where(row == column, 1.0, 0.0) - X
  A, X = bf16_parts(A, 3), bf16_parts(X, 3)
  for i, j in sorted(itertools.product(range(3), repeat=2), key=sum)[:-1]:
    E -= matmul(A[i], X[j])
  return E


class Inverse(NamedTuple):
  """X = (I + A)^-1 plus an optional residual below X's last digit, which a sum would lose."""

  X: jax.Array
  residual: jax.Array | None

  @classmethod
  def refine(cls, X, A, A_error):
    """Return (I + A + A_error)^-1 from X = (I + A)^-1 by one Newton step; X if no error."""
    if A_error is None:
      return cls(X, None)
    return cls(X, matmul(X, residual(A, X) - matmul(A_error, X, parts=2), parts=2))

  def times(self, Y, dims=NN):
    """Return X Y and its residual (None if X has none), which their sum would often round away."""
    rest = None if self.residual is None else matmul(self.residual, Y, dims, parts=2)
    return matmul(self.X, Y, dims), rest


def split(x, parts):
  """Return the bfloat16 parts of x as int32 words [rows/2, C].

  The merges only move and mask lanes, which handles two bfloat16 rows per word at once.
  """
  return [pltpu.bitcast(y, jnp.int32) for y in bf16_parts(x, parts)]


def merge_inverses(X, A, n, parts):
  """Return the inverses of the 2n-blocks of I + A from those of its n-blocks, as [n, C] rows.

  [[P, 0], [B, D]]^-1 = [[P^-1, 0], [-D^-1 B P^-1, D^-1]] for all blocks of all heads at once. Each
  of the two matmuls needs half of the contraction; the idle rows of the weights hold the next
  bfloat16 part, so that a_i (b_j + b_j+1) takes one pass over one load of weights.

  Args:
    X: [n, C] float32 per head, the n x n blocks side by side.
    A: the parts of [C, C] per head, see `split`.
  """
  C = X[0].shape[1]
  lane = lax.broadcasted_iota(jnp.int32, (n // 2, C), 1)
  even = (lane & n) == 0
  pairs = [(i, even & ((lane & -2 * n) == i)) for i in range(0, C, 2 * n)]
  zero = jnp.zeros((n // 2, C), jnp.int32)

  def block_matmul(x, upper, blocks):
    # x: parts in the even lanes if upper else the odd; blocks: parts of the weights of each pair.
    own = even if upper else ~even
    total = None
    for j in reversed(range(0, parts, 2)):
      weights = []
      for w in blocks:
        w = [w[j], w[j + 1] if j + 1 < parts else zero]
        weights += w if upper else w[::-1]
      lhs = []
      for i in range(parts - j):
        # Part i times weight part j + 1 is needed only if it exceeds the rounding of the last part.
        other = zero
        if i + j + 1 < parts:
          other = jnp.take_along_axis(x[i], lane ^ n, 1, mode="promise_in_bounds")
        lhs.append(jnp.where(own, x[i], other))
      lhs, weights = (pltpu.bitcast(jnp.concatenate(y, axis=0), BF16) for y in (lhs, weights))
      y = matmul(lhs, weights)
      for i in reversed(range(parts - j)):
        term = y[i * n : (i + 1) * n]
        total = term if total is None else total + term
    return total

  rows = lambda a, i: a[(i + n) // 2 : (i + 2 * n) // 2]
  B = [[[jnp.where(m, rows(y, i), zero) for y in a] for i, m in pairs] for a in A]
  Xs = [split(x, parts) for x in X]
  P = [[[jnp.where(m, y, zero) for y in x] for _, m in pairs] for x in Xs]
  DB = [split(block_matmul(x, False, b), parts) for x, b in zip(Xs, B)]
  DBP = [block_matmul(x, True, p) for x, p in zip(DB, P)]
  even = (lax.broadcasted_iota(jnp.int32, (n, C), 1) & n) == 0
  return [
    jnp.concatenate([jnp.where(even, x, 0.0), jnp.where(even, -y, x)], axis=0)
    for x, y in zip(X, DBP)
  ]


def inverse_by_substitution(A, base):
  """Return the inverses of the base x base diagonal blocks of every I + A[h], as [base, C] rows.

  The blocks fill the lanes side by side. A step subtracts one row from all later rows of its block,
  with coefficients broadcast over the block's lanes by a lane gather. A tile is rows 8t..8t+7 of
  every block of all heads, [heads * 8, C].
  """
  G, C = len(A), A[0].shape[1]
  lane = lax.broadcasted_iota(jnp.int32, (G * 8, C), 1)
  sub = lax.broadcasted_iota(jnp.int32, (G * 8, C), 0) & 7
  block = lane & -base
  tiles = range(base // 8)
  X = [jnp.where((lane & (base - 1)) == sub + 8 * t, 1.0, 0.0) for t in tiles]
  blocks = [jnp.concatenate([a[i : i + 8] for a in A], axis=0) for i in range(0, C, 8)]
  coefs = blocks[: base // 8]
  for n in range(1, C // base):
    for t in tiles:
      coefs[t] = jnp.where(block == n * base, blocks[n * (base // 8) + t], coefs[t])
  for j in range(base - 1):
    row = X[j // 8].reshape(G, 8, C)[:, j % 8 : j % 8 + 1]
    row = jnp.broadcast_to(row, (G, 8, C)).reshape(G * 8, C)
    for t in range((j + 1) // 8, base // 8):
      X[t] = X[t] - jnp.take_along_axis(coefs[t], block + j, 1, mode="promise_in_bounds") * row
  return [jnp.concatenate([x[8 * h : 8 * h + 8] for x in X], axis=0) for h in range(G)]


def unit_lower_inverse(A, base, precision):
  """Return [(I + a)^-1 for a in A], a strictly lower triangular [C, C] float32, one per head."""
  C = A[0].shape[0]
  n = min(base, C)
  X = inverse_by_substitution(A, n)
  if n < C:
    A = [split(a, PARTS[precision]) for a in A]
  while n < C:
    X = merge_inverses(X, A, n, PARTS[precision])
    n *= 2
  return X
