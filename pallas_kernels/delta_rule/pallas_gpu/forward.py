"""Forward kernel on NVIDIA GPUs: one program carries a block of a head's state over all chunks.

X comes from `intra_chunk`, for all chunks in parallel: inside the loop it would be the longest
dependency chain, be recomputed by every value block, and spill. The scores P come from there too,
unless `scores_in_place`. Linear attention has no beta and no X.
"""

import jax
from jax import lax

from pallas_kernels.delta_rule.pallas_gpu.decay import load_chunk, scale_rows
from pallas_kernels.delta_rule.pallas_gpu.launch import launch_over_chunks
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, dot
from pallas_kernels.delta_rule.pallas_gpu.per_channel_gate import decayed_inputs
from pallas_kernels.delta_rule.pallas_gpu.state_update import (
  next_state,
  state_program,
  written_values,
)
from pallas_kernels.delta_rule.pallas_gpu.tiles import tile_for


def _body(
  q_ref, k_ref, v_ref, o_ref, S_ref, P_ref=None, beta_ref=None, X_ref=None, g_ref=None,
  segments_ref=None, total_ref=None, k_start_ref=None, S0_ref=None,
  *, group, chunk, scale, block_k, block_v,
):  # fmt: skip
  # q, k [B L H dk], v [B L Hv dv], P [N B Hv C C], beta [B L Hv], X [N B Hv matrices C C],
  # g [B L Hv], segments [B L], total and k_start of `DecayedKeys`, S0 [B Hv dk dv]
  # -> o [B L Hv dv], S [B Hv dk dv]
  p = state_program(k_ref, group, block_k, block_v)
  b, h, hk, parts = p.b, p.h, p.hk, p.parts

  def step(n, S):
    rows, beta, _, _, decay = load_chunk(k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk)
    K = p.load_keys(k_ref, rows)
    K_start = K if k_start_ref is None else p.load_keys(k_start_ref, rows)
    KS = QS = QK = 0.0
    for i, S_i in enumerate(S):
      if X_ref is not None:
        KS += dot(K_start(i), S_i, parts)
      Q = q_ref[b, rows, hk, p.key_blocks[i]]
      QS += dot(Q, S_i, parts)
      QK += dot(Q, K(i), parts, NT) if P_ref is None else 0.0
    P = None if P_ref is not None else (QK * decay.score_factors() * scale).astype(k_ref.dtype)
    V = v_ref[b, rows, h, p.cols]
    R, residual = written_values(V, KS, beta, decay, X_ref, (n, b, h), parts)
    O = scale_rows(QS, decay.start) * scale
    O += dot(P_ref[n, b, h, :, :] if P is None else P, R, parts, residual=residual)
    o_ref[b, rows, h, p.cols] = O.astype(o_ref.dtype)
    return next_state(S, K, R, residual, decay, p.total_decays(n, decay, total_ref), parts)

  S = lax.fori_loop(0, k_ref.shape[1] // chunk, step, p.load_state(S0_ref))
  p.store_state(S_ref, S)


def forward(
  q, k, v, beta, X, P, g, segments, S0, decayed=None, *, chunk, scale, tile=None, interpret=False
):
  """Return o = scale q S and the final S.

  L is a multiple of the chunk, head sizes are powers of two >= 16. With per-channel gates `decayed`
  replaces q, k, g and segments.
  """
  per_channel = decayed is not None
  q, k, g, segments, total, k_start = decayed_inputs(q, k, g, segments, decayed)
  B, Hv, dk, dv = k.shape[0], v.shape[2], k.shape[3], v.shape[3]
  found = launch_over_chunks(
    "fwd",
    _body,
    dict(q=q, k=k, v=v, P=P, beta=beta, X=X, g=g, segments=segments)
    | dict(total=total, k_start=k_start, S0=S0),
    dict(o=v, S=jax.ShapeDtypeStruct((B, Hv, dk, dv), F32)),
    v=v,
    chunk=chunk,
    scale=scale,
    tile=tile or tile_for("fwd", k, delta_rule=X is not None, per_channel=per_channel),
    interpret=interpret,
  )
  return found["o"], found["S"]
