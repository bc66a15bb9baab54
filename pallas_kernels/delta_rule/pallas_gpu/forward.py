"""Fused delta rule forward for NVIDIA GPUs: the state stays on chip over all chunks of a head.

The inverses X come from `intra`, for all chunks in parallel: inside the loop they would be its
longest dependent chain, be repeated by every value block, and spill. So do the scores P unless
`scores_in_place`. Linear attention has no beta and no X.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.decay import load_chunk, pick, program_ids, scale_rows
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, dot
from pallas_kernels.delta_rule.pallas_gpu.per_channel_gate import decayed_inputs
from pallas_kernels.delta_rule.pallas_gpu.state_update import (
  first_state,
  load_keys,
  load_whole,
  next_state,
  writes,
)
from pallas_kernels.delta_rule.pallas_gpu.tiles import call, tile_for


def _body(q_ref, k_ref, v_ref, *refs, given, group, chunk, scale, block_k, block_v):
  # q, k [B L H dk], v [B L Hv dv], P [N B Hv C C]?, beta [B L Hv]?, X [N B Hv matrices C C]?,
  # g [B L Hv]?, segments [B L]?, whole and k_into of `Decayed`?, S0 [B Hv dk dv]?
  # -> o [B L Hv dv], S [B Hv dk dv]
  *refs, o_ref, S_ref = refs
  P_ref, beta_ref, X_ref, g_ref, segments_ref, whole_ref, into_ref, refs = pick(refs, *given)
  j, h, b, hk = program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  parts = parts_for(k_ref.dtype)

  def step(n, S):
    rows, beta, _, _, decay = load_chunk(k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk)
    K = load_keys(k_ref, (b, rows, hk), key_blocks)
    K_into = K if into_ref is None else load_keys(into_ref, (b, rows, hk), key_blocks)
    KS = QS = QK = 0.0
    for i, S_i in enumerate(S):
      if X_ref is not None:
        KS += dot(K_into(i), S_i, parts)
      Q = q_ref[b, rows, hk, key_blocks[i]]
      QS += dot(Q, S_i, parts)
      QK += dot(Q, K(i), parts, NT) if P_ref is None else 0.0
    P = None if P_ref is not None else (QK * decay.inside() * scale).astype(k_ref.dtype)
    R, rest = writes(v_ref[b, rows, h, cols], KS, beta, decay, X_ref, (n, b, h), parts)
    O = scale_rows(QS, decay.start) * scale
    O += dot(P_ref[n, b, h, :, :] if P is None else P, R, parts, rest=rest)
    o_ref[b, rows, h, cols] = O.astype(o_ref.dtype)
    whole = load_whole(decay, whole_ref, (n, b, h), key_blocks)
    return next_state(S, K, R, rest, decay, whole, parts)

  S = first_state(refs, b, h, key_blocks, cols)
  S = lax.fori_loop(0, k_ref.shape[1] // chunk, step, S)
  for S_i, keys in zip(S, key_blocks):
    S_ref[b, h, keys, cols] = S_i


def forward(
  q, k, v, beta, X, P, g, segments, S0, decayed=None, *, chunk, scale, tile=None, interpret=False
):
  """o = scale q S and the last S; L a multiple of the chunk, head sizes powers of two >= 16.

  Where channels decay, `decayed` takes the place of q, k, g and segments.
  """
  channels = decayed is not None
  q, k, g, segments, whole, k_into = decayed_inputs(q, k, g, segments, decayed)
  B, _, H, dk = k.shape
  Hv, dv = v.shape[2:]
  tile = tile or tile_for("fwd", k, delta_rule=X is not None, channels=channels)
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    _body,
    given=[x is not None for x in (P, beta, X, g, segments, whole, k_into)],
    group=Hv // H,
    chunk=chunk,
    scale=scale,
    block_k=min(tile.block_k, dk),
    block_v=block_v,
  )
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    jax.ShapeDtypeStruct((B, Hv, dk, dv), F32),
  ]
  options = dict(
    grid=(dv // block_v, Hv, B), tile=tile, interpret=interpret, delta_rule=X is not None
  )
  args = (q, k, v, P, beta, X, g, segments, whole, k_into, S0)
  return call("fwd", body, args, out_shape, **options)
