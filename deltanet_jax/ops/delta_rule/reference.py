"""Recurrent form of the delta rule, one token of one head at a time: the definition."""

import jax
import jax.numpy as jnp
from jax import lax


def step(S, q_t, k_t, v_t, beta_t, g_t=None):
  """Update the state of one head by one token, then read it; g_t is a scalar, `[dk]` or None."""
  if g_t is not None:
    S = jnp.broadcast_to(jnp.exp(g_t), k_t.shape)[:, None] * S
  S = S + beta_t * jnp.outer(k_t, v_t - k_t @ S)
  return S, q_t @ S


def recurrent(q, k, v, beta, g, S0, segments):
  """Scan `step` over tokens, `[B L H ·]`, with one key head per value head.

  Args:
    segments: `[B L]` segment number of each token, or None; the state is reset where it changes.
  """

  def one_head(q, k, v, beta, g, S0, segments):
    def body(S, x):
      segment_start, token = x
      if segment_start is not None:
        S = jnp.where(segment_start, 0, S)
      return step(S, *token)

    starts = None if segments is None else jnp.diff(segments, prepend=segments[:1]) != 0
    S, o = lax.scan(body, S0, (starts, (q, k, v, beta, g)))
    return o, S

  heads = jax.vmap(one_head, in_axes=(1, 1, 1, 1, 1, 0, None), out_axes=(1, 0))
  return jax.vmap(heads)(q, k, v, beta, g, S0, segments)
