"""unit_lower_inverse: accuracy on hard matrices and its gradient rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import unit_lower_inverse
from deltanet_jax.ops.testing import rel_rms


def from_keys(keys, beta, C, n=3):
  rng = np.random.default_rng(0)
  K = rng.standard_normal((n, C, 32))
  if keys != "random":
    K = K[:, :1] + {"identical": 0.0, "nearly identical": 1e-3}[keys] * K
  K = K / np.linalg.norm(K, axis=-1, keepdims=True)
  return np.tril(beta * K @ np.swapaxes(K, 1, 2), -1)


@pytest.mark.parametrize("C", [1, 2, 3, 16, 37, 64, 128])
@pytest.mark.parametrize("keys", ["random", "identical", "nearly identical"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_rounding_error_grows_only_with_the_size(C, keys, beta):
  """Also for the alternating inverses of beta = 2, up to the rounding of one matmul's sums."""
  A = from_keys(keys, beta, C).astype(np.float32).astype(np.float64)
  want = np.linalg.inv(np.eye(C) + A)
  assert rel_rms(unit_lower_inverse(jnp.asarray(A, jnp.float32)), want) < 2e-7 * C
  assert rel_rms(unit_lower_inverse(jnp.asarray(A)), want) < 1e-11


def test_upper_triangle_is_ignored_and_batches_nest():
  A = from_keys("random", 1.0, 24)
  X = unit_lower_inverse(jnp.asarray(A))
  noisy = A + np.triu(np.ones((24, 24)))
  np.testing.assert_array_equal(unit_lower_inverse(jnp.asarray(noisy)), X)
  nested = jax.vmap(jax.vmap(unit_lower_inverse))(jnp.asarray(A)[None])
  assert rel_rms(nested[0], X) < 1e-14


def test_gradient_rule():
  A = jnp.asarray(from_keys("random", 1.0, 24))
  dX = jnp.asarray(np.random.default_rng(1).standard_normal(A.shape))
  (got,) = jax.vjp(unit_lower_inverse, A)[1](dX)
  dense = lambda A: jnp.linalg.inv(jnp.eye(24)[None] + jnp.tril(A, -1))
  (want,) = jax.vjp(dense, A)[1](dX)
  assert rel_rms(got, want) < 1e-12
  np.testing.assert_array_equal(jnp.triu(got), 0)


@pytest.mark.parametrize("A", [jnp.zeros((3,)), jnp.zeros((3, 4)), jnp.zeros((3, 3), int)])
def test_error_names_the_input(A):
  with pytest.raises((ValueError, TypeError), match="A"):
    unit_lower_inverse(A)
