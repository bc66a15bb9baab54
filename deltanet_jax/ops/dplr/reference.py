"""The recurrence with a diagonal plus low rank transition, token by token: the definition."""

import jax
import jax.numpy as jnp
from jax import lax


def step(S, q_t, k_t, v_t, a_t, b_t, g_t=None):
  """One token of one head, then its read-out; g_t is a scalar, `[dk]` or None."""
  kept = S if g_t is None else jnp.broadcast_to(jnp.exp(g_t), k_t.shape)[:, None] * S
  S = kept - jnp.outer(b_t, a_t @ S) + jnp.outer(k_t, v_t)
  return S, q_t @ S


def recurrent(q, k, v, a, b, g, S0, segments):
  """`lax.scan` of `step` over tokens, `[B L H ·]`; emptied where a segment begins."""

  def one_head(q, k, v, a, b, g, S0, segments):
    def body(S, x):
      segment_start, token = x
      if segment_start is not None:
        S = jnp.where(segment_start, 0, S)
      return step(S, *token)

    begins = None if segments is None else jnp.diff(segments, prepend=segments[:1]) != 0
    S, o = lax.scan(body, S0, (begins, (q, k, v, a, b, g)))
    return o, S

  heads = jax.vmap(one_head, in_axes=(1,) * 6 + (0, None), out_axes=(1, 0))
  return jax.vmap(heads)(q, k, v, a, b, g, S0, segments)
