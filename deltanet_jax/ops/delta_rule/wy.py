"""WY representation of a chunk: the paper's recursion (eq. 7) and UT transform (eq. 10, 11)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from deltanet_jax.ops.triangular import unit_lower_inverse


def wy_representation(
  K: Float[Array, "C dk"], V: Float[Array, "C dv"], beta: Float[Array, " C"]
) -> tuple[Float[Array, "C dk"], Float[Array, "C dv"]]:
  """Compute the WY representation (W, U) of a chunk row by row.

  w_r = beta_r (k_r - sum_{i<r} w_i (k_i . k_r)), and u_r likewise with v_r. Then the product of all
  (I - beta_t k_t k_t^T) is I - K^T W, and a chunk that starts from S ends at S + K^T (U - W S).
  """

  def row(WU, x):
    r, k_r, v_r, beta_r = x
    target = jnp.concatenate([k_r, v_r])
    return WU.at[r].set(beta_r * (target - (K @ k_r) @ WU)), None

  C, dk = K.shape
  # Rows from r on are still zero when row r is computed, so the sum over i < r is a full matmul.
  WU = jnp.zeros((C, dk + V.shape[1]), V.dtype)
  WU, _ = lax.scan(row, WU, (jnp.arange(C), K, V, beta))
  return WU[:, :dk], WU[:, dk:]


def ut_transform(
  K: Float[Array, "C dk"], V: Float[Array, "C dv"], beta: Float[Array, " C"]
) -> tuple[Float[Array, "C C"], Float[Array, "C dk"], Float[Array, "C dv"]]:
  """Compute (T, W, U) of a chunk with matmuls.

  T = (I + tril(diag(beta) K K^T, -1))^-1 diag(beta), W = T K and U = T V.
  """
  T = unit_lower_inverse(jnp.tril(beta[:, None] * (K @ K.T), -1)) * beta[None, :]
  return T, T @ K, T @ V
