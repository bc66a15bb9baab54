"""What kernels compute, without kernels, for their second derivatives."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.delta_rule.ut import scan

F32 = jnp.float32


def transform(k, v, beta, g, documents, chunk):
  """(W, U) of every chunk, [N B Hv C d] in k's dtype, by products that JAX differentiates."""
  B, L, H, _ = k.shape
  N, Hv = L // chunk, v.shape[2]
  einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
  K = jnp.repeat(scan.by_chunks(k.astype(F32), chunk), Hv // H, axis=2)
  V, betas = (scan.by_chunks(x.astype(F32), chunk) for x in (v, beta))
  inside, start = scan.chunk_decays(g, documents, N, B, chunk)[:2]
  A = einsum("nbhid,nbhjd->nbhij", betas[..., None] * K, K)
  X = _unit_lower_inverse(jnp.tril(A * inside, -1), einsum)
  W = einsum("nbhij,nbhjd->nbhid", X, (betas * start)[..., None] * K)
  U = einsum("nbhij,nbhjd->nbhid", X, betas[..., None] * V)
  return W.astype(k.dtype), U.astype(k.dtype)


def _unit_lower_inverse(A, einsum):
  """(I + A)^-1 by merging diagonal blocks of 1, 2, 4, .. rows, all of a size at once."""
  C = A.shape[-1]
  i, j = np.indices((C, C))
  X = jnp.broadcast_to(jnp.eye(C, dtype=A.dtype), A.shape)
  for size in (1 << n for n in range((C - 1).bit_length())):
    below = (i // (2 * size) == j // (2 * size)) & (i // size % 2 == 1) & (j // size % 2 == 0)
    right = einsum("nbhij,nbhjk->nbhik", jnp.where(below, A, 0), X)
    X = X - einsum("nbhij,nbhjk->nbhik", X, right)
  return X


def delta_rule(q, k, v, beta, g, S0, segment_ids, *, scale, chunk):
  """(o, S) over a sequence, with the kernels' dtypes."""
  of_chunk = functools.partial(transform, chunk=chunk)
  return scan.delta_rule_by_scan(
    q, k, v, beta, g, S0, segment_ids, scale=scale, chunk=chunk, transform=of_chunk
  )


def linear_attention(q, k, v, beta, g, S0, segment_ids, *, scale, chunk):
  """The same of linear attention, beta None: W = 0 erases nothing, and U = V."""
  assert beta is None

  def transform(k, v, *_):
    W = jnp.repeat(jnp.zeros_like(scan.by_chunks(k, chunk)), v.shape[2] // k.shape[2], axis=2)
    return W, scan.by_chunks(v, chunk)

  return scan.delta_rule_by_scan(
    q, k, v, beta, g, S0, segment_ids, scale=scale, chunk=chunk, transform=transform
  )
