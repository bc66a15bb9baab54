"""Recurrent form of the log-max scan: the definition."""

import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.segments import segment_starts

# The exponent of a zero sum: below any other, and far enough from overflow to add to it.
EMPTY = -1e38


def empty(shape, dtype):
  """Return empty sums A and B and their unit p, stacked before the last axis."""
  nothing = jnp.zeros(shape, dtype)
  return jnp.stack([nothing, nothing, jnp.full(shape, EMPTY, dtype)], axis=-2)


def add(p1, p2, *pairs):
  """Return x1 e^p1 + x2 e^p2 for each pair, in units of e^p, and p = max(p1, p2)."""
  # The output does not depend on the unit, so it has no gradient.
  p = lax.stop_gradient(jnp.maximum(p1, p2))
  first, second = jnp.exp(p1 - p), jnp.exp(p2 - p)
  return *(first * x1 + second * x2 for x1, x2 in pairs), p


def read(A, B, p, k, v, u):
  """Return the average of the accumulated tokens and the current one."""
  A, B, _ = add(p, u + k, (A, v), (B, jnp.ones_like(v)))
  return A / B


def recurrent(k, v, w, u, S0, segment_ids):
  """Return (y, S) by a scan over tokens; the state is reset where a segment starts."""
  dtype = S0.dtype
  w, u = w[None], u[None]

  def step(S, x):
    k_t, v_t, start = x
    k_t, v_t = k_t.astype(dtype), v_t.astype(dtype)
    if start is not None:
      S = jnp.where(start[:, None, None], empty(k_t.shape, dtype), S)
    A, B, p = S[:, 0], S[:, 1], S[:, 2]
    y = read(A, B, p, k_t, v_t, u)
    return jnp.stack(add(p + w, k_t, (A, v_t), (B, jnp.ones_like(v_t))), axis=1), y

  starts = None if segment_ids is None else segment_starts(segment_ids).T
  S, y = lax.scan(step, S0, (jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0), starts))
  return jnp.moveaxis(y, 0, 1), S
