"""Parallel form of the delta rule: an L x L attention matrix."""

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.ops import decay as decays
from deltanet_jax.ops.nonfinite import (
  has_nonfinite,
  nonfinite_reach,
  propagate_nonfinite,
  zero_nonfinite,
  zero_nonfinite_gate,
)
from deltanet_jax.ops.triangular import unit_lower_inverse


def _one_chunk(q, k, beta, g, segments):
  """P, T = (I + A)^-1 diag(beta) and the decay of one head; the sequence is one chunk."""
  L = q.shape[0]
  decay = decays.chunk_decay(g, segments, None if segments is None else segments[0], q.dtype)
  lower = np.tril(np.ones((L, L)))
  mask = jnp.asarray(np.stack([lower, np.tril(lower, -1)]), q.dtype)
  P, KK = decays.scores(jnp.stack([q, k]), k, decay, mask)
  return P, unit_lower_inverse(beta[:, None] * KK) * beta[None, :], decay


def attention(q, k, beta, g, segments):
  """Return A = (Q K^T * M) T, `[B H L L]`, so that o = A v for a zero initial state."""

  def one_head(q, k, beta, g, segments):
    P, T, _ = _one_chunk(q, k, beta, g, segments)
    return P @ T

  heads = jax.vmap(one_head, in_axes=(1, 1, 1, 1, None))
  return jax.vmap(heads)(q, k, beta, g, segments)


def parallel(q, k, v, beta, g, S0, segments):
  """Return (o, S), computed with L x L matrices; q and k have as many heads as v."""
  before = has_nonfinite(S0[:, None])[:, 0]
  reached = nonfinite_reach(has_nonfinite(k, v, beta, gate=g), segments, before=before)
  q_ok, k, v, beta, S0 = map(zero_nonfinite, (q, k, v, beta, S0))
  o, S = _parallel(q_ok, k, v, beta, zero_nonfinite_gate(g), S0, segments)
  return propagate_nonfinite(o, S, reached, has_nonfinite(q))


def _parallel(q, k, v, beta, g, S0, segments):
  def one_head(q, k, v, beta, g, S0, segments):
    P, T, decay = _one_chunk(q, k, beta, g, segments)
    if decay is None:
      R = T @ (v - k @ S0)
      return q @ S0 + P @ R, S0 + k.T @ R
    R = T @ (v - (decay.into * k) @ S0)
    return (decay.into * q) @ S0 + P @ R, decay.total * S0 + (decay.out * k).T @ R

  heads = jax.vmap(one_head, in_axes=(1, 1, 1, 1, 1, 0, None), out_axes=(1, 0))
  return jax.vmap(heads)(q, k, v, beta, g, S0, segments)
