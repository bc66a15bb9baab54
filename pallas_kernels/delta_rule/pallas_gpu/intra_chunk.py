"""Intra-chunk kernel on NVIDIA GPUs: scores P = scale Q K^T and X = (I + A)^-1 of every chunk.

P only if the kernels that carry a state do not compute it themselves. With per-channel gates also
the decayed queries and keys, so that these kernels need no gates.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.decay import load_chunk, program_ids
from pallas_kernels.delta_rule.pallas_gpu.inverse import inverse_shape, store_inverse
from pallas_kernels.delta_rule.pallas_gpu.launch import launch_kernel
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, dot, gram
from pallas_kernels.delta_rule.pallas_gpu.per_channel_gate import (
  DecayedKeys,
  channel_scores,
  decayed_shapes,
  store_decayed,
)
from pallas_kernels.delta_rule.pallas_gpu.tiles import scores_in_place, tile_for


def _body(
  k_ref, q_ref=None, beta_ref=None, g_ref=None, segments_ref=None,
  P_ref=None, X_ref=None, q_start_ref=None, k_end_ref=None, total_ref=None, k_start_ref=None,
  *, chunk, per_channel, group, scale, block_k, precision,
):  # fmt: skip
  # q, k [B L H dk], beta [B L Hv], g [B L Hv] or [B L Hv dk], segments [B L]
  # -> P with masks and decays [N B Hv C C], X [N B Hv matrices C C], the arrays of `DecayedKeys`
  n, h, b, hk = program_ids(group)
  parts = parts_for(k_ref.dtype)
  rows, beta, zero, iotas, decay = load_chunk(
    k_ref, beta_ref, None if per_channel else g_ref, segments_ref, n, b, h, hk, chunk
  )

  def over_keys(i, P):
    cols = pl.ds(i * block_k, block_k)
    return P + dot(q_ref[b, rows, hk, cols], k_ref[b, rows, hk, cols], parts, NT)

  def store_scores(P):
    P_ref[n, b, h, :, :] = (P * decay.score_factors() * scale).astype(P_ref.dtype)

  if per_channel:
    at = (n, b, rows, hk, h)
    P, KK = channel_scores(q_ref, k_ref, g_ref, at, iotas, zero, block_k, X_ref is not None)
    store_scores(P)
    refs = (q_start_ref, k_end_ref, total_ref, k_start_ref)
    store_decayed(*refs, q_ref, k_ref, g_ref, at, iotas, zero, block_k, decay)
    grams = KK, None
  elif X_ref is not None:
    grams = gram(k_ref, b, rows, hk, block_k)
  if X_ref is not None:
    factors = decay.score_factors() * beta[:, None]
    store_inverse(X_ref, (n, b, h), grams, factors, precision, iotas, zero)
  if P_ref is not None and not per_channel:
    P = jnp.zeros((chunk, chunk), F32)
    store_scores(lax.fori_loop(0, k_ref.shape[-1] // block_k, over_keys, P))


def intra(
  q, k, v, beta, g, segments, *, scale, chunk, inverse_precision, tile=None, interpret=False
):
  """Return (P, X, `DecayedKeys`) of every chunk, in k's dtype.

  P is [N B Hv C C], or None without gates if `scores_in_place`. X is [N B Hv matrices C C] (two
  matrices for float32, see `store_inverse`), or None if inverse_precision is None; beta may then be
  None too. The last is None without per-channel gates.
  """
  B, L, H, dk = k.shape
  Hv = v.shape[2]
  # With gates, computing scores in place would repeat the exponentials for every value block.
  scores = g is not None or not scores_in_place(k)
  if not scores and inverse_precision is None:
    return None, None, None
  kernel = "scores" if inverse_precision is None else "intra"
  per_channel, delta_rule = g is not None and g.ndim == 4, beta is not None
  tile = tile or tile_for(
    kernel, k, gated=g is not None, delta_rule=delta_rule, per_channel=per_channel
  )
  body = functools.partial(
    _body,
    chunk=chunk,
    per_channel=per_channel,
    group=Hv // H,
    scale=scale,
    block_k=min(tile.block_k, dk),
    precision=inverse_precision,
  )
  outputs = {}
  if scores:
    outputs["P"] = jax.ShapeDtypeStruct((L // chunk, B, Hv, chunk, chunk), k.dtype)
  if inverse_precision is not None:
    outputs["X"] = inverse_shape(L // chunk, B, Hv, chunk, k.dtype)
  if per_channel:
    outputs |= decayed_shapes(k, Hv, chunk, delta_rule)
  found = launch_kernel(
    kernel,
    body,
    dict(q=q if scores else None, k=k, beta=beta, g=g, segments=segments),
    outputs,
    grid=(L // chunk, Hv, B),
    tile=tile,
    interpret=interpret,
    delta_rule=delta_rule,
  )
  P, X = found.pop("P", None), found.pop("X", None)
  return P, X, DecayedKeys(**found) if per_channel else None
