"""Recurrent form of the diagonal state space: the definition."""

import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.segments import segment_starts


def recurrent(u, log_A, B, C, S0, segment_ids):
  """Return (y, S) by a scan over tokens; the state is reset where a segment starts."""
  A = jnp.exp(log_A)[None]
  S0 = jnp.zeros((u.shape[0], *log_A.shape), log_A.dtype) if S0 is None else S0

  def step(S, x):
    u_t, start = x
    if start is not None:
      S = jnp.where(start[:, None, None], 0, S)
    S = A * S + B[None] * u_t.astype(S.dtype)[:, :, None]
    return S, 2 * (C[None] * S).real.sum(axis=2)

  starts = None if segment_ids is None else segment_starts(segment_ids).T
  S, y = lax.scan(step, S0, (jnp.moveaxis(u, 1, 0), starts))
  return jnp.moveaxis(y, 0, 1), S
