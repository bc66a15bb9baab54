"""What the fused kernels need of every chunk: scores P = scale Q K^T, and X = (I + A)^-1."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.chunk import load_chunk, pick, program_ids
from pallas_kernels.delta_rule.pallas_gpu.inverse import inverse_shape, store_inverse
from pallas_kernels.delta_rule.pallas_gpu.products import F32, NT, dot, gram
from pallas_kernels.delta_rule.pallas_gpu.tiles import call, tile_for


def _intra_body(q_ref, k_ref, *refs, given, group, scale, block_k, precision):
  # -> P = scale QK^T with masks and decays [N B Hv C C], and X likewise unless precision is None
  beta_ref, g_ref, documents_ref, (P_ref, *X_refs) = pick(refs, *given)
  chunk = P_ref.shape[-1]
  n, h, b, hk = program_ids(group)
  parts = parts_for(k_ref.dtype)
  rows, beta, zero, iotas, decay = load_chunk(
    k_ref, beta_ref, g_ref, documents_ref, n, b, h, hk, chunk
  )
  for X_ref in X_refs:
    grams = gram(k_ref, b, rows, hk, block_k)
    scores = decay.inside() * beta[:, None]
    store_inverse(X_ref, (n, b, h), grams, scores, precision, iotas, zero)

  def over_keys(i, P):
    cols = pl.ds(i * block_k, block_k)
    return P + dot(q_ref[b, rows, hk, cols], k_ref[b, rows, hk, cols], parts, NT)

  P = jnp.zeros((chunk, chunk), F32)
  P = lax.fori_loop(0, k_ref.shape[-1] // block_k, over_keys, P)
  P_ref[n, b, h, :, :] = (P * decay.inside() * scale).astype(P_ref.dtype)


def intra(
  q, k, v, beta, g, documents, *, scale, chunk, inverse_precision, tile=None, interpret=False
):
  """[P, X] of every chunk in k's dtype; [P] alone if inverse_precision is None.

  P is [N B Hv C C]; X has an axis before its last two: for float32 it is the sum of two matrices.
  Without X there need be no beta.
  """
  B, L, H, dk = k.shape
  Hv = v.shape[2]
  kernel = "scores" if inverse_precision is None else "intra"
  full, erases = g is not None or documents is not None, beta is not None
  tile = tile or tile_for(kernel, k, full=full, erases=erases)
  body = functools.partial(
    _intra_body,
    given=[x is not None for x in (beta, g, documents)],
    group=Hv // H,
    scale=scale,
    block_k=min(tile.block_k, dk),
    precision=inverse_precision,
  )
  out_shape = [jax.ShapeDtypeStruct((L // chunk, B, Hv, chunk, chunk), k.dtype)]
  if inverse_precision is not None:
    out_shape.append(inverse_shape(L // chunk, B, Hv, chunk, k.dtype))
  options = dict(grid=(L // chunk, Hv, B), tile=tile, interpret=interpret, erases=erases)
  return call(kernel, body, (q, k, beta, g, documents), out_shape, **options)
