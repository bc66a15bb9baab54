"""(I + A)^-1 on GPUs, by merges of blocks or by substitution; and products with it."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.bf16 import PARTS
from pallas_kernels.delta_rule.pallas_gpu.decay import strict_lower
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NN, dot, split


def unit_lower_inverse(A, precision, iotas, zero):
  """X = (I + A)^-1 for strictly lower A, by 2x2 block merges or by forward substitution."""
  chunk = A.shape[0]
  row, column = iotas
  eye = jnp.where(row == column, 1.0, 0.0)
  if precision == "substitution":

    def step(i, X):
      a = jnp.sum(jnp.where(row == i, A, 0.0), axis=0)
      new = eye - jnp.sum(a[:, None] * X, axis=0)[None, :]
      return jnp.where(row == i, new, X)

    return lax.fori_loop(1, chunk, step, eye)
  parts = PARTS[precision]

  def merge(level, X):
    # Row in the odd, column in the even half of one block of 2^(level+1); A is zero above.
    A_level = jnp.where((((row + zero * level) ^ column) >> level) == 1, A, 0.0)
    return X - dot(dot(X, A_level, parts), X, parts)

  # A loop, not unrolled: the descriptors of every product would be hoisted and spill.
  first = eye - jnp.where((row ^ column) == 1, A, 0.0)
  return lax.fori_loop(1, chunk.bit_length() - 1, merge, first)


def residual(A, X, iotas):
  """I - (I + A) X, largest terms first: products of single parts cancel almost without rounding."""
  row, column = iotas
  E = jnp.where(row == column, 1.0, 0.0) - X
  A, X = split(A, 3), split(X, 3)
  for i, j in sorted(itertools.product(range(3), repeat=2), key=sum)[:-1]:
    E -= dot(A[i], X[j], 1)
  return E


def store_inverse(X_ref, at, grams, scores, precision, iotas, zero):
  """Writes X = (I + A)^-1 to X_ref [at, 0], and a rest below its last digit to [at, 1] if asked.

  grams are K K^T and its missing digits or None, see `gram`. Returns what `times_inverse` takes.
  Added to X, the rest would be rounded away.
  """
  A, missing = (None if G is None else strict_lower(G * scores, iotas) for G in grams)
  X = [unit_lower_inverse(A, precision, iotas, zero)]
  if X_ref.shape[-3] == 2:
    # A step of Newton's method, towards (I + A + missing)^-1.
    E = residual(A, X[0], iotas)
    E = E if missing is None else E - dot(missing, X[0], 2)
    X.append(dot(X[0], E, 2))
  for i, x in enumerate(X):
    X_ref[*at, i, :, :] = x.astype(X_ref.dtype)
  return X


def inverse_shape(N, B, Hv, chunk, dtype):
  """[N B Hv matrices C C]: X, and for float32 its rest."""
  return jax.ShapeDtypeStruct((N, B, Hv, 2 if dtype == F32 else 1, chunk, chunk), dtype)


def times_inverse(X, Y, parts, dims=NN):
  """X Y, or X^T Y if dims is TN."""
  out, rest = times_inverse_split(X, Y, parts, dims)
  return out if rest is None else out + rest


def times_inverse_split(X, Y, parts, dims=NN):
  """X Y or X^T Y, and a rest (None if X has none) that a sum of the two would often lose."""
  return dot(X[0], Y, parts, dims), None if len(X) == 1 else dot(X[1], Y, 2, dims)


def load_inverse(X_ref, at):
  return [X_ref[*at, i, :, :] for i in range(X_ref.shape[-3])]
