"""What the fused kernels need of every chunk: scores P = scale Q K^T, and X = (I + A)^-1.

Scores only where the kernels with a state do not compute them themselves. Where key channels decay
also the queries and keys with their decays, of which the other kernels then need none.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.decay import load_chunk, pick, program_ids
from pallas_kernels.delta_rule.pallas_gpu.inverse import inverse_shape, store_inverse
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, dot, gram
from pallas_kernels.delta_rule.pallas_gpu.per_channel_gate import (
  Decayed,
  channel_scores,
  decayed_shapes,
  store_decayed,
)
from pallas_kernels.delta_rule.pallas_gpu.tiles import call, scores_in_place, tile_for


def _intra_body(*refs, given, chunk, channels, group, scale, block_k, precision):
  # q? [B L H dk], k [B L H dk] -> P = scale QK^T with masks and decays [N B Hv C C] if there is a
  # q, X likewise unless precision is None, and what `Decayed` has if there are channels
  q_ref, k_ref, beta_ref, g_ref, segments_ref, refs = pick(refs, *given)
  P_ref, X_ref, decayed_refs = pick(refs, q_ref is not None, precision is not None)
  n, h, b, hk = program_ids(group)
  parts = parts_for(k_ref.dtype)
  rows, beta, zero, iotas, decay = load_chunk(
    k_ref, beta_ref, None if channels else g_ref, segments_ref, n, b, h, hk, chunk
  )

  def over_keys(i, P):
    cols = pl.ds(i * block_k, block_k)
    return P + dot(q_ref[b, rows, hk, cols], k_ref[b, rows, hk, cols], parts, NT)

  def store_scores(P):
    P_ref[n, b, h, :, :] = (P * decay.inside() * scale).astype(P_ref.dtype)

  if channels:
    chunk_at = (n, b, rows, hk, h)
    P, KK = channel_scores(q_ref, k_ref, g_ref, chunk_at, iotas, zero, block_k, X_ref is not None)
    store_scores(P)
    store_decayed(decayed_refs, q_ref, k_ref, g_ref, chunk_at, iotas, zero, block_k, decay)
    grams = KK, None
  elif X_ref is not None:
    grams = gram(k_ref, b, rows, hk, block_k)
  if X_ref is not None:
    scores = decay.inside() * beta[:, None]
    store_inverse(X_ref, (n, b, h), grams, scores, precision, iotas, zero)
  if P_ref is not None and not channels:
    P = jnp.zeros((chunk, chunk), F32)
    store_scores(lax.fori_loop(0, k_ref.shape[-1] // block_k, over_keys, P))


def intra(
  q, k, v, beta, g, segments, *, scale, chunk, inverse_precision, tile=None, interpret=False
):
  """(P, X, `Decayed`) of every chunk in k's dtype.

  P is [N B Hv C C], or None without gates where `scores_in_place`; X has an axis before its last
  two: for float32 it is the sum of two matrices. X is None if inverse_precision is, and there need
  be no beta; the last unless channels decay.
  """
  B, L, H, dk = k.shape
  Hv = v.shape[2]
  # With gates the exponentials would be repeated for every block of values.
  scores = g is not None or not scores_in_place(k)
  if not scores and inverse_precision is None:
    return None, None, None
  kernel = "scores" if inverse_precision is None else "intra"
  channels, delta_rule = g is not None and g.ndim == 4, beta is not None
  tile = tile or tile_for(kernel, k, full=g is not None, delta_rule=delta_rule, channels=channels)
  body = functools.partial(
    _intra_body,
    given=[scores, True, *(x is not None for x in (beta, g, segments))],
    chunk=chunk,
    channels=channels,
    group=Hv // H,
    scale=scale,
    block_k=min(tile.block_k, dk),
    precision=inverse_precision,
  )
  out_shape = []
  if scores:
    out_shape.append(jax.ShapeDtypeStruct((L // chunk, B, Hv, chunk, chunk), k.dtype))
  if inverse_precision is not None:
    out_shape.append(inverse_shape(L // chunk, B, Hv, chunk, k.dtype))
  if channels:
    out_shape += decayed_shapes(k, Hv, chunk, delta_rule)
  options = dict(grid=(L // chunk, Hv, B), tile=tile, interpret=interpret, delta_rule=delta_rule)
  args = (q if scores else None, k, beta, g, segments)
  out = call(kernel, body, args, out_shape, **options)
  P, X, decayed = pick(out, scores, inverse_precision is not None)
  return P, X, Decayed(*decayed) if channels else None
