"""Recurrent form of decayed linear attention: the definition."""

import jax
import jax.numpy as jnp
from jax import lax


def step(S, q_t, k_t, v_t, g_t=None, h_t=None):
  """Decay and update the state of one head by one token, then read it.

  g_t is a scalar or `[dk]`, h_t is `[dv]`.
  """
  if g_t is not None:
    S = jnp.broadcast_to(jnp.exp(g_t), k_t.shape)[:, None] * S
  if h_t is not None:
    S = S * jnp.exp(h_t)[None]
  S = S + jnp.outer(k_t, v_t)
  return S, q_t @ S


def recurrent(q, k, v, g, h, S0, segments):
  """Scan `step` over tokens, `[B L H ·]`; the state is reset where a segment starts."""

  def one_head(q, k, v, g, h, S0, segments):
    def body(S, x):
      segment_start, token = x
      if segment_start is not None:
        S = jnp.where(segment_start, 0, S)
      return step(S, *token)

    starts = None if segments is None else jnp.diff(segments, prepend=segments[:1]) != 0
    S, o = lax.scan(body, S0, (starts, (q, k, v, g, h)))
    return o, S

  heads = jax.vmap(one_head, in_axes=(1, 1, 1, 1, 1, 0, None), out_axes=(1, 0))
  return jax.vmap(heads)(q, k, v, g, h, S0, segments)
