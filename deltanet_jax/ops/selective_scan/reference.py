"""Recurrent form of the selective scan: the definition."""

import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.segments import segment_starts


def recurrent(u, dt, A, B, C, S0, segment_ids):
  """Return (y, S) by a scan over tokens; the state is reset where a segment starts."""
  dtype = S0.dtype

  def step(S, x):
    u_t, dt_t, B_t, C_t, start = x
    if start is not None:
      S = jnp.where(start[:, None, None], 0, S)
    wrote = (dt_t * u_t.astype(dtype))[:, :, None] * B_t.astype(dtype)[:, None, :]
    S = jnp.exp(dt_t[:, :, None] * A[None]) * S + wrote
    return S, jnp.einsum("bdn,bn->bd", S, C_t.astype(dtype))

  starts = None if segment_ids is None else segment_starts(segment_ids).T
  tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (u, dt, B, C))
  S, y = lax.scan(step, S0, (*tokens, starts))
  return jnp.moveaxis(y, 0, 1), S
