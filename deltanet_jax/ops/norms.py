"""Normalisations over the last axis, computed in float32 at least."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Inside the root of the L2 norm and beside the L1 norm, as the public checkpoints have it.
_EPS = 1e-6


def wide_dtype(dtype):
  """float32, or float64 for float64: the dtype of states, sums and softmax."""
  return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def wide(x):
  return x.astype(wide_dtype(x.dtype))


def rms_norm(
  x: Float[Array, "*b d"], scale: Float[Array, " d"], eps: float
) -> Float[Array, "*b d"]:
  """scale x / sqrt(mean(x^2) + eps)."""
  y = wide(x)
  y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
  return (y * scale.astype(y.dtype).reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


def l2_norm(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
  """x / sqrt(sum(x^2) + 1e-6)."""
  y = wide(x)
  return (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + _EPS)).astype(x.dtype)


def l1_norm(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
  """x / (sum |x| + 1e-6)."""
  y = wide(x)
  return (y / (jnp.sum(jnp.abs(y), axis=-1, keepdims=True) + _EPS)).astype(x.dtype)
