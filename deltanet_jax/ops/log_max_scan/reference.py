"""The log-max scan token by token: the definition."""

import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.segments import segment_starts

# The exponent of a sum that is 0, below any other and far enough from overflow to be added to.
EMPTY = -1e38


def empty(shape, dtype):
  """Sums A and B of nothing and their unit p, stacked before the last axis."""
  nothing = jnp.zeros(shape, dtype)
  return jnp.stack([nothing, nothing, jnp.full(shape, EMPTY, dtype)], axis=-2)


def add(p1, p2, *pairs):
  """x1 e^p1 + x2 e^p2 for each pair, in units of e^p, and p = max(p1, p2)."""
  # A unit is no quantity: what is read does not depend on it.
  p = lax.stop_gradient(jnp.maximum(p1, p2))
  first, second = jnp.exp(p1 - p), jnp.exp(p2 - p)
  return *(first * x1 + second * x2 for x1, x2 in pairs), p


def read(A, B, p, k, v, u):
  """The average of all that is in the sums and of the current token."""
  A, B, _ = add(p, u + k, (A, v), (B, jnp.ones_like(v)))
  return A / B


def recurrent(k, v, w, u, S0, segment_ids):
  """(y, S), one token after the other; the state is emptied where a segment begins."""
  dtype = S0.dtype
  w, u = w[None], u[None]

  def step(S, x):
    k_t, v_t, begins = x
    k_t, v_t = k_t.astype(dtype), v_t.astype(dtype)
    if begins is not None:
      S = jnp.where(begins[:, None, None], empty(k_t.shape, dtype), S)
    A, B, p = S[:, 0], S[:, 1], S[:, 2]
    y = read(A, B, p, k_t, v_t, u)
    return jnp.stack(add(p + w, k_t, (A, v_t), (B, jnp.ones_like(v_t))), axis=1), y

  begins = None if segment_ids is None else segment_starts(segment_ids).T
  S, y = lax.scan(step, S0, (jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0), begins))
  return jnp.moveaxis(y, 0, 1), S
