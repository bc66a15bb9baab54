"""Chunkwise form of the log-max scan: an associative scan per chunk, rematerialized."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltanet_jax.ops.log_max_scan.reference import EMPTY, add, empty, read
from deltanet_jax.ops.segments import segment_starts

# The log decay that resets the state: above EMPTY, below any sum of keys and decays.
_RESET = -1e30


def chunkwise(k, v, w, u, S0, segment_ids, *, chunk):
  """Return (y, S), computed `chunk` tokens at a time."""
  dtype, batch, L = S0.dtype, *k.shape[:2]
  size = min(chunk, L)
  n = -(-L // size)
  starts = segment_starts(segment_ids)
  # Padded tokens neither decay nor write.
  real = jnp.asarray(np.arange(n * size).reshape(n, size) < L)

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, n * size - L)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, n, size, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def one_chunk(S, x):
    (k, v, starts), real = x
    k, v, real = k.astype(dtype), v.astype(dtype), real[None, :, None]
    decay = jnp.broadcast_to(jnp.where(real, w[None, None], 0), k.shape)
    before = S[:, None]  # [B 1 3 D]
    if starts is not None:
      decay = jnp.where(starts[..., None], _RESET, decay)
    elements = decay, v, jnp.broadcast_to(real, k.shape).astype(dtype), jnp.where(real, k, EMPTY)
    decay, A, B, p = lax.associative_scan(_join, elements, axis=1)
    A0, B0, p0 = (before[:, :, i] for i in range(3))
    states = jnp.stack(add(p0 + decay, p, (A0, A), (B0, B)), axis=2)
    before = jnp.concatenate([before, states[:, :-1]], axis=1)
    if starts is not None:
      nothing = empty(k.shape, dtype)
      before = jnp.where(starts[..., None, None], nothing, before)
    A, B, p = (before[:, :, i] for i in range(3))
    return states[:, -1], read(A, B, p, k, v, u[None, None])

  S, y = lax.scan(one_chunk, S0, (jax.tree.map(split, (k, v, starts)), real))
  return jnp.moveaxis(y, 0, 1).reshape(batch, n * size, y.shape[3])[:, :L], S


def _join(first, second):
  (decay1, A1, B1, p1), (decay2, A2, B2, p2) = first, second
  return decay1 + decay2, *add(p1 + decay2, p2, (A1, A2), (B1, B2))
