"""Reference implementations of the kernels in plain JAX, for second derivatives."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.delta_rule.ut import scan

F32 = jnp.float32


def transform(k, v, beta, g, segments, chunk):
  """Return (W, U) of every chunk, [N B Hv C d] in k's dtype, differentiable by JAX."""
  B, L, H, _ = k.shape
  N, Hv = L // chunk, v.shape[2]
  einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
  K = jnp.repeat(scan.to_chunks(k.astype(F32), chunk), Hv // H, axis=2)
  V, betas = (scan.to_chunks(x.astype(F32), chunk) for x in (v, beta))
  D, start = scan.chunk_decays(g, segments, N, B, chunk)[:2]
  A = einsum("nbhid,nbhjd->nbhij", betas[..., None] * K, K)
  X = _unit_lower_inverse(jnp.tril(A * D, -1), einsum)
  W = einsum("nbhij,nbhjd->nbhid", X, (betas * start)[..., None] * K)
  U = einsum("nbhij,nbhjd->nbhid", X, betas[..., None] * V)
  return W.astype(k.dtype), U.astype(k.dtype)


def _unit_lower_inverse(A, einsum):
  """Return (I + A)^-1 by merging diagonal blocks of 1, 2, 4, .. rows, all of one size at once."""
  C = A.shape[-1]
  i, j = np.indices((C, C))
  X = jnp.broadcast_to(jnp.eye(C, dtype=A.dtype), A.shape)
  for size in (1 << n for n in range((C - 1).bit_length())):
    below = (i // (2 * size) == j // (2 * size)) & (i // size % 2 == 1) & (j // size % 2 == 0)
    right = einsum("nbhij,nbhjk->nbhik", jnp.where(below, A, 0), X)
    X = X - einsum("nbhij,nbhjk->nbhik", X, right)
  return X


def delta_rule(q, k, v, beta, g, S0, segment_ids, *, scale, chunk):
  """Apply the delta rule chunkwise, with the dtypes of the kernels; return (o, S_L)."""
  chunk_transform = functools.partial(transform, chunk=chunk)
  return scan.delta_rule_by_scan(
    q, k, v, beta, g, S0, segment_ids, scale=scale, chunk=chunk, transform=chunk_transform
  )


def linear_attention(q, k, v, beta, g, S0, segment_ids, *, scale, chunk):
  """Apply linear attention chunkwise (beta is None): W = 0 and U = V; return (o, S_L)."""
  assert beta is None

  def transform(k, v, *_):
    W = jnp.repeat(jnp.zeros_like(scan.to_chunks(k, chunk)), v.shape[2] // k.shape[2], axis=2)
    return W, scan.to_chunks(v, chunk)

  return scan.delta_rule_by_scan(
    q, k, v, beta, g, S0, segment_ids, scale=scale, chunk=chunk, transform=transform
  )


def recurrent(q, k, v, beta, g, S0, segment_ids, *, scale):
  """Apply the recurrence token by token, for per-channel gates; beta may be None."""
  B, _, H, dk = q.shape
  Hv, dv = v.shape[2:]
  einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
  time_first = lambda x: None if x is None else jnp.moveaxis(x.astype(F32), 1, 0)
  q, k = (time_first(jnp.repeat(x, Hv // H, axis=2)) for x in (q, k))
  same_segment = None
  if segment_ids is not None:
    before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    same_segment = time_first(segment_ids == before)

  def step(S, x):
    q, k, v, beta, g, same_segment = x
    S = S if same_segment is None else S * same_segment[:, None, None, None]
    S = S if g is None else S * jnp.exp(g)[..., None]
    R = v if beta is None else beta[..., None] * (v - einsum("bhk,bhkv->bhv", k, S))
    S = S + einsum("bhk,bhv->bhkv", k, R)
    return S, scale * einsum("bhk,bhkv->bhv", q, S)

  S = jnp.zeros((B, Hv, dk, dv), F32) if S0 is None else S0.astype(F32)
  S, o = lax.scan(step, S, (q, k, time_first(v), time_first(beta), time_first(g), same_segment))
  return jnp.moveaxis(o, 0, 1).astype(v.dtype), S
