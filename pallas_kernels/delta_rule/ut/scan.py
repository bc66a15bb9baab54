"""Delta rule from a UT-transform kernel: W, U of all chunks at once, then lax.scan over chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.delta_rule.pallas_gpu.tiles import prepare

F32 = jnp.float32


def einsum(spec, a, b):
  """Return the einsum in float32."""
  # bfloat16 inputs: one bfloat16 matmul, as in the kernels. float32: IEEE, never TF32.
  precision = lax.Precision.HIGHEST if a.dtype == F32 else None
  return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=F32)


def to_chunks(x, chunk):
  """Reshape [B L ...] to [N B ... C ...]: chunks first for the scan, heads before tokens."""
  B, L = x.shape[:2]
  x = jnp.moveaxis(x.reshape(B, L // chunk, chunk, *x.shape[2:]), 1, 0)
  return jnp.moveaxis(x, 2, 3) if x.ndim > 3 else x


def chunk_decays(g, segments, N, B, chunk):
  """Return the decays of all chunks: D [N B Hv C C], start, end [N B Hv C] and total [N B Hv]."""
  lower = np.tril(np.ones((chunk, chunk), bool))
  keep = jnp.broadcast_to(lower, (N, B, 1, chunk, chunk))
  start = end = jnp.ones((N, B, 1, chunk), F32)
  total = jnp.ones((N, B, 1), F32)
  if segments is not None:
    s = to_chunks(segments, chunk)[:, :, None]  # [N B 1 C]
    carried = jnp.concatenate([s[:1, ..., 0], s[:-1, ..., -1]])
    keep = keep & (s[..., :, None] == s[..., None, :])
    start = (s == carried[..., None]).astype(F32)
    end = (s == s[..., -1:]).astype(F32)
    total = (carried == s[..., -1]).astype(F32)
  D = jnp.where(keep, 1.0, 0.0)
  if g is not None:
    gs = to_chunks(g.astype(F32), chunk)  # [N B Hv C]
    # Sums over the tokens in between: differences of cumulative sums would cancel.
    between = jnp.cumsum(jnp.where(np.tril(lower, -1), gs[..., None], 0.0), axis=-2)
    D = D * jnp.exp(between)
    start = start * jnp.exp(jnp.cumsum(gs, axis=-1))
    end = end * jnp.exp(lax.cumsum(gs, axis=gs.ndim - 1, reverse=True) - gs)
    total = total * jnp.exp(jnp.sum(gs, axis=-1))
  return D, start, end, total


def _scan_chunks(q, k, v, beta, g, segments, S0, *, scale, chunk, transform):
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  C, N = chunk, L // chunk
  dtype = k.dtype
  W, U = transform(k, v, beta, g, segments)
  D, start, end, total = chunk_decays(g, segments, N, B, C)
  Q, K = to_chunks(q, C), to_chunks(k, C)
  heads = lambda x: jnp.repeat(x, Hv // H, axis=2)
  P = (heads(einsum("nbhck,nbhdk->nbhcd", Q, K)) * D).astype(dtype)
  Q, K = heads(Q), heads(K)

  def step(S, x):
    Q, K, W, U, P, start, end, total = x
    R = U.astype(F32) - einsum("bhck,bhkv->bhcv", W, S.astype(dtype))
    O = start[..., None] * einsum("bhck,bhkv->bhcv", Q, S.astype(dtype))
    O += einsum("bhcd,bhdv->bhcv", P, R.astype(dtype))
    new = einsum("bhck,bhcv->bhkv", K, (end[..., None] * R).astype(dtype))
    return total[..., None, None] * S + new, (O * scale).astype(v.dtype)

  S = jnp.zeros((B, Hv, dk, dv), F32) if S0 is None else S0
  S, O = lax.scan(jax.checkpoint(step), S, (Q, K, W, U, P, start, end, total))
  o = jnp.moveaxis(O, (0, 2), (1, 3)).reshape(B, L, Hv, dv)
  return o, S


def delta_rule_by_scan(q, k, v, beta, g, S0, segment_ids, *, scale, chunk, transform):
  """Apply the delta rule to a sequence and return (o, S_L).

  The residuals are the inputs; the backward pass recomputes everything else.

  Args:
    transform: (k, v, beta, g, segments) -> (W, U) of all chunks.
  """
  length, dk, dv = v.shape[1], k.shape[-1], v.shape[-1]
  args = prepare(q, k, v, beta, g, S0, segment_ids, chunk)
  scan = functools.partial(_scan_chunks, scale=scale, chunk=chunk, transform=transform)
  o, S = jax.checkpoint(scan)(*args)
  return o[:, :length, :, :dv], S[:, :, :dk, :dv]
