"""The delta rule token by token: the definition against which everything else is measured."""

import jax
import jax.numpy as jnp
from jax import lax


def step(S, q_t, k_t, v_t, beta_t, g_t=None):
  """One token of one head: decay, erase and write, then read; g_t is a scalar, `[dk]` or None."""
  if g_t is not None:
    S = jnp.broadcast_to(jnp.exp(g_t), k_t.shape)[:, None] * S
  S = S + beta_t * jnp.outer(k_t, v_t - k_t @ S)
  return S, q_t @ S


def recurrent(q, k, v, beta, g, S0, segments):
  """`lax.scan` of `step` over tokens, `[B L H ·]`, with one key head per value head.

  Args:
    segments: `[B L]` segment number of each token or None; the state is emptied where it changes.
  """

  def one_head(q, k, v, beta, g, S0, segments):
    def body(S, x):
      segment_start, token = x
      if segment_start is not None:
        S = jnp.where(segment_start, 0, S)
      return step(S, *token)

    changes = None if segments is None else jnp.diff(segments, prepend=segments[:1]) != 0
    S, o = lax.scan(body, S0, (changes, (q, k, v, beta, g)))
    return o, S

  heads = jax.vmap(one_head, in_axes=(1, 1, 1, 1, 1, 0, None), out_axes=(1, 0))
  return jax.vmap(heads)(q, k, v, beta, g, S0, segments)
