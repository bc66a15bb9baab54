"""X = (I + A)^-1 on GPU: block merges or forward substitution, and matmuls with X."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.bf16 import PARTS
from pallas_kernels.delta_rule.pallas_gpu.decay import strict_lower
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NN, dot, split


def unit_lower_inverse(A, precision, iotas, zero):
  """Return (I + A)^-1 for strictly lower A, by 2x2 block merges or by forward substitution."""
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

  # A loop: unrolled, the descriptors of all matmuls would be hoisted and spill.
  first = eye - jnp.where((row ^ column) == 1, A, 0.0)
  return lax.fori_loop(1, chunk.bit_length() - 1, merge, first)


def inverse_residual(A, X, iotas):
  """Return I - (I + A) X, largest terms first: single-part matmuls cancel almost exactly."""
  row, column = iotas
  E = jnp.where(row == column, 1.0, 0.0) - X
  A, X = split(A, 3), split(X, 3)
  for i, j in sorted(itertools.product(range(3), repeat=2), key=sum)[:-1]:
    E -= dot(A[i], X[j], 1)
  return E


def store_inverse(X_ref, at, grams, factors, precision, iotas, zero):
  """Store X = (I + A)^-1 in X_ref[at, 0] and, for float32, its residual in X_ref[at, 1].

  The residual holds digits below X's last one, which a sum of the two would round away.

  Args:
    grams: K K^T and its rounding error or None, see `gram`.
    factors: [C C], of K K^T in A: beta and decays.

  Returns:
    [X] or [X, residual], the argument of `times_inverse`.
  """
  A, A_error = (None if KK is None else strict_lower(KK * factors, iotas) for KK in grams)
  X = [unit_lower_inverse(A, precision, iotas, zero)]
  if X_ref.shape[-3] == 2:
    # One Newton step towards (I + A + A_error)^-1.
    E = inverse_residual(A, X[0], iotas)
    E = E if A_error is None else E - dot(A_error, X[0], 2)
    X.append(dot(X[0], E, 2))
  for i, x in enumerate(X):
    X_ref[*at, i, :, :] = x.astype(X_ref.dtype)
  return X


def inverse_shape(N, B, Hv, chunk, dtype):
  """Return the shape of X [N B Hv matrices C C]; for float32 the second matrix is the residual."""
  return jax.ShapeDtypeStruct((N, B, Hv, 2 if dtype == F32 else 1, chunk, chunk), dtype)


def load_inverse(X_ref, at):
  """Return [X] or [X, residual] of the chunk and head `at`."""
  return [X_ref[*at, i, :, :] for i in range(X_ref.shape[-3])]


def times_inverse(X, Y, parts, dims=NN):
  """Return X Y, or X^T Y if dims is TN."""
  out, residual = times_inverse_split(X, Y, parts, dims)
  return out if residual is None else out + residual


def times_inverse_split(X, Y, parts, dims=NN):
  """Return X Y or X^T Y, and its residual (None if X has none), which a sum would often lose."""
  return dot(X[0], Y, parts, dims), None if len(X) == 1 else dot(X[1], Y, 2, dims)
