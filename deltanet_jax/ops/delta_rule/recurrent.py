"""Recurrent form of the delta rule, optimized for CPU; `reference.py` is the definition."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def recurrent(q, k, v, beta, g, S0, segments):
  """Scan over tokens of all heads at once, `[B L H ·]`, one key head per value head.

  Time is the leading axis, so that a step reads contiguous memory. Batch and heads are one axis,
  and beta multiplies the vector v - k S, not the outer product. On a CPU this is 3-4x faster
  (fwd+bwd) than the definition.

  Args:
    segments: `[B L]` segment number of each token, or None; the state is reset where it changes.
  """

  # Recomputing a step from the previous state halves the residuals; memory traffic dominates.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def step(S, token):
    q, k, v, beta, g, segment_start = token
    if segment_start is not None:
      S = jnp.where(segment_start[:, None, None], 0, S)
    if g is not None:
      S = jnp.exp(g if g.ndim == 2 else g[:, None])[..., None] * S
    R = beta[:, None] * (v - jnp.einsum("nk,nkv->nv", k, S))
    S = S + k[:, :, None] * R[:, None]
    return S, jnp.einsum("nk,nkv->nv", q, S)

  B, L, H, dv = v.shape
  segment_start = None
  if segments is not None:
    segment_start = jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
    segment_start = jnp.broadcast_to(segment_start[:, :, None], (B, L, H))
  tokens = jax.tree.map(
    lambda x: jnp.moveaxis(x, 1, 0).reshape(L, B * H, *x.shape[3:]),
    (q, k, v, beta, g, segment_start),
  )
  S, o = lax.scan(step, S0.reshape(B * H, *S0.shape[2:]), tokens)
  return jnp.moveaxis(o.reshape(L, B, H, dv), 0, 1), S.reshape(S0.shape)
