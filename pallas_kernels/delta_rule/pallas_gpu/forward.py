"""Fused delta rule forward for NVIDIA GPUs: the state stays on chip over all chunks of a head.

The inverses X and scores P come from `intra`, for all chunks in parallel: inside the loop they
would be its longest dependent chain, be repeated by every value block, and spill.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.chunk import load_chunk, pick, program_ids, scale_rows
from pallas_kernels.delta_rule.pallas_gpu.products import F32, dot
from pallas_kernels.delta_rule.pallas_gpu.state import first_state, load_keys, next_state, writes
from pallas_kernels.delta_rule.pallas_gpu.tiles import call, tile_for


def _body(
  k_ref, v_ref, beta_ref, X_ref, q_ref, P_ref, *refs, flags, group, scale, block_k, block_v
):
  # k [B L H dk], v [B L Hv dv], beta [B L Hv], X [N B Hv matrices C C], q like k, P [N B Hv C C],
  # g [B L Hv]?, documents [B L]?, S0 [B Hv dk dv]? -> o [B L Hv dv], S [B Hv dk dv]
  *refs, o_ref, S_ref = refs
  has_g, has_documents = flags
  g_ref, documents_ref, refs = pick(refs, has_g, has_documents)
  j, h, b, hk = program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  parts = parts_for(k_ref.dtype)
  chunk = X_ref.shape[-1]

  def step(n, S):
    rows, beta, _, _, decay = load_chunk(beta_ref, g_ref, documents_ref, n, b, h, chunk)
    K = load_keys(k_ref, (b, rows, hk), key_blocks)
    KS = QS = 0.0
    for i, S_i in enumerate(S):
      KS += dot(K(i), S_i, parts)
      QS += dot(q_ref[b, rows, hk, key_blocks[i]], S_i, parts)
    V = v_ref[b, rows, h, cols].astype(F32)
    R, rest = writes(V, KS, beta, decay, X_ref, (n, b, h), parts)
    O = scale_rows(QS, decay.start) * scale
    O += dot(P_ref[n, b, h, :, :], R, parts, rest=rest)
    o_ref[b, rows, h, cols] = O.astype(o_ref.dtype)
    return next_state(S, K, R, rest, decay, parts)

  S = first_state(refs, b, h, key_blocks, cols)
  S = lax.fori_loop(0, k_ref.shape[1] // chunk, step, S)
  for S_i, keys in zip(S, key_blocks):
    S_ref[b, h, keys, cols] = S_i


def forward(q, k, v, beta, X, P, g, documents, S0, *, scale, tile=None, interpret=False):
  """o = scale q S and the last S; L a multiple of the chunk, head sizes powers of two >= 16."""
  B, _, H, dk = k.shape
  Hv, dv = v.shape[2:]
  tile = tile or tile_for("fwd", k)
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    _body,
    flags=(g is not None, documents is not None),
    group=Hv // H,
    scale=scale,
    block_k=min(tile.block_k, dk),
    block_v=block_v,
  )
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    jax.ShapeDtypeStruct((B, Hv, dk, dv), F32),
  ]
  options = dict(grid=(dv // block_v, Hv, B), tile=tile, interpret=interpret)
  return call("fwd", body, (k, v, beta, X, q, P, g, documents, S0), out_shape, **options)
