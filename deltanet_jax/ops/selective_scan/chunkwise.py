"""Chunkwise form of the selective scan; the backward pass recomputes the states of a chunk."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.segments import segment_starts


def chunkwise(u, dt, A, B, C, S0, segment_ids, *, chunk):
  """Return (y, S), computed `chunk` tokens at a time."""
  batch, L = u.shape[:2]
  size = min(chunk, L)
  n = -(-L // size)
  starts = segment_starts(segment_ids)

  def split(x):
    # A padded token has dt = 0: it does not change the state.
    x = jnp.pad(x, [(0, 0), (0, n * size - L)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, n, size, *x.shape[2:]), 1, 0)

  # On a CPU an associative scan is 5-10x slower than a scan over tokens.
  one = _scan_tokens if target_platform() == "cpu" else _associative_scan
  one_chunk = jax.checkpoint(functools.partial(one, A))
  S, y = lax.scan(one_chunk, S0, jax.tree.map(split, (u, dt, B, C, starts)))
  return jnp.moveaxis(y, 0, 1).reshape(batch, n * size, y.shape[3])[:, :L], S


def _associative_scan(A, S, x):
  """Compute one chunk with an associative scan."""
  (u, dt, B, C, starts), dtype = x, S.dtype
  decay = jnp.exp(dt[..., None] * A[None, None])
  wrote = (dt * u.astype(dtype))[..., None] * B.astype(dtype)[:, :, None, :]
  if starts is not None:
    # A decay factor of 0 resets the state.
    decay = jnp.where(starts[:, :, None, None], 0, decay)
  total_decay, states = lax.associative_scan(_combine, (decay, wrote), axis=1)
  states = states + total_decay * S[:, None]
  return states[:, -1], jnp.einsum("btdn,btn->btd", states, C.astype(dtype))


def _combine(first, second):
  (decay1, wrote1), (decay2, wrote2) = first, second
  return decay2 * decay1, decay2 * wrote1 + wrote2


def _scan_tokens(A, S, x):
  """Compute one chunk with a scan over tokens; channels are last because D is larger than N."""
  dtype = S.dtype

  @jax.checkpoint
  def step(S, x):
    u_t, dt_t, B_t, C_t, start = x
    if start is not None:
      S = jnp.where(start[:, None, None], 0, S)
    wrote = (dt_t * u_t.astype(dtype))[:, None, :] * B_t.astype(dtype)[:, :, None]
    S = jnp.exp(dt_t[:, None, :] * A.T[None]) * S + wrote
    return S, (S * C_t.astype(dtype)[:, :, None]).sum(axis=1)

  tokens = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), x)
  S, y = lax.scan(step, S.swapaxes(1, 2), tokens)
  return S.swapaxes(1, 2), jnp.moveaxis(y, 0, 1)
