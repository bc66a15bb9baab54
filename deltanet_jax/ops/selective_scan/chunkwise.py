"""The selective scan in chunks: an associative scan inside, recomputed in the backward."""

import jax
import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.documents import changes


def chunkwise(u, dt, A, B, C, S0, segment_ids, *, chunk):
  """(y, S) of `chunk` tokens at a time."""
  dtype, batch, L = S0.dtype, *u.shape[:2]
  size = min(chunk, L)
  n = -(-L // size)
  begins = None if segment_ids is None else changes(segment_ids)

  def split(x):
    # A padded token has dt = 0: it decays by 1 and writes nothing.
    x = jnp.pad(x, [(0, 0), (0, n * size - L)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, n, size, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def one_chunk(S, x):
    u, dt, B, C, begins = x
    decay = jnp.exp(dt[..., None] * A[None, None])
    wrote = (dt * u.astype(dtype))[..., None] * B.astype(dtype)[:, :, None, :]
    if begins is not None:
      # A factor of 0 forgets the document before.
      decay = jnp.where(begins[:, :, None, None], 0, decay)
    kept, states = lax.associative_scan(_combine, (decay, wrote), axis=1)
    states = states + kept * S[:, None]
    return states[:, -1], jnp.einsum("btdn,btn->btd", states, C.astype(dtype))

  S, y = lax.scan(one_chunk, S0, jax.tree.map(split, (u, dt, B, C, begins)))
  return jnp.moveaxis(y, 0, 1).reshape(batch, n * size, y.shape[3])[:, :L], S


def _combine(first, second):
  (decay1, wrote1), (decay2, wrote2) = first, second
  return decay2 * decay1, decay2 * wrote1 + wrote2
