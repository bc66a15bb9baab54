"""Backward kernels on NVIDIA GPUs that run over the chunks: states and their gradients.

`states` recomputes R and the state before each chunk. `dstates` carries dS over all chunks, last to
first, and writes it per chunk; the kernels of `grads.py` then process all chunks in parallel. One
loop doing both would write partial sums of dq and dk per value block and move more data: 8 dk bytes
per token and block, written and read again, instead of 2 dk dv / C here.
"""

import jax
from jax import lax

from pallas_kernels.delta_rule.pallas_gpu.decay import load_chunk, scale_rows
from pallas_kernels.delta_rule.pallas_gpu.inverse import load_inverse, times_inverse_split
from pallas_kernels.delta_rule.pallas_gpu.launch import launch_over_chunks
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, TN, dot
from pallas_kernels.delta_rule.pallas_gpu.per_channel_gate import decayed_inputs
from pallas_kernels.delta_rule.pallas_gpu.state_update import (
  next_state,
  state_program,
  written_values,
)
from pallas_kernels.delta_rule.pallas_gpu.tiles import tile_for


def _states_body(
  k_ref, v_ref, states_ref, R_ref=None, beta_ref=None, X_ref=None, g_ref=None, segments_ref=None,
  total_ref=None, k_start_ref=None, S0_ref=None, *, group, chunk, block_k, block_v,
):  # fmt: skip
  # k [B L H dk], v [B L Hv dv], beta [B L Hv], X [N B Hv matrices C C], g [B L Hv],
  # segments [B L], total and k_start of `DecayedKeys`, S0 [B Hv dk dv]
  # -> states [N B Hv dk dv], with an X also R [B L Hv dv]
  p = state_program(k_ref, group, block_k, block_v)
  b, h, hk, parts = p.b, p.h, p.hk, p.parts

  def step(n, S):
    rows, beta, _, _, decay = load_chunk(k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk)
    K = p.load_keys(k_ref, rows)
    K_start = K if k_start_ref is None else p.load_keys(k_start_ref, rows)
    KS = 0.0
    if X_ref is not None:
      for i, S_i in enumerate(S):
        KS += dot(K_start(i), S_i, parts)
    V = v_ref[b, rows, h, p.cols]
    R, residual = written_values(V, KS, beta, decay, X_ref, (n, b, h), parts)
    if X_ref is not None:
      R_ref[b, rows, h, p.cols] = R.astype(R_ref.dtype)
    for S_i, keys in zip(S, p.key_blocks):
      states_ref[n, b, h, keys, p.cols] = S_i.astype(states_ref.dtype)
    return next_state(S, K, R, residual, decay, p.total_decays(n, decay, total_ref), parts)

  lax.fori_loop(0, k_ref.shape[1] // chunk, step, p.load_state(S0_ref))


def states(k, v, beta, X, g, segments, S0, decayed=None, *, chunk, tile=None, interpret=False):
  """Return the state before each chunk [N B Hv dk dv] and R [B L Hv dv], both in k's dtype.

  R is None without an X. The matmuls of the backward pass round both to k's dtype anyway, so
  bfloat16 inputs lose nothing. With per-channel gates `decayed` replaces k, g and segments.
  """
  per_channel = decayed is not None
  _, k, g, segments, total, k_start = decayed_inputs(None, k, g, segments, decayed)
  B, L, _, dk = k.shape
  Hv, dv = v.shape[2:]
  outputs = dict(states=jax.ShapeDtypeStruct((L // chunk, B, Hv, dk, dv), k.dtype))
  if X is not None:
    outputs["R"] = jax.ShapeDtypeStruct(v.shape, k.dtype)
  found = launch_over_chunks(
    "states",
    _states_body,
    dict(k=k, v=v, beta=beta, X=X, g=g, segments=segments, total=total, k_start=k_start, S0=S0),
    outputs,
    v=v,
    chunk=chunk,
    tile=tile or tile_for("states", k, delta_rule=X is not None, per_channel=per_channel),
    interpret=interpret,
  )
  return found["states"], found.get("R")


def _dstates_body(
  q_ref, k_ref, do_ref, dS_ref, dY_ref, dstates_ref, dS0_ref, P_ref=None, beta_ref=None, X_ref=None,
  g_ref=None, segments_ref=None, total_ref=None, k_start_ref=None,
  *, group, chunk, scale, block_k, block_v,
):  # fmt: skip
  # q, k [B L H dk], do [B L Hv dv], dS [B Hv dk dv], P [N B Hv C C], beta [B L Hv],
  # X [N B Hv matrices C C], g [B L Hv], segments [B L], total and k_start of `DecayedKeys`
  # -> dY [B L Hv dv], dstates [N B Hv dk dv] (of the state after each chunk), dS0 [B Hv dk dv]
  p = state_program(k_ref, group, block_k, block_v)
  b, h, hk, parts = p.b, p.h, p.hk, p.parts
  chunks = k_ref.shape[1] // chunk

  def step(done, dS):
    n = chunks - 1 - done
    rows, beta, _, _, decay = load_chunk(k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk)
    K = p.load_keys(k_ref, rows)
    K_start = K if k_start_ref is None else p.load_keys(k_start_ref, rows)
    # Loaded once if scores are computed in place; otherwise late, to stay live for less time.
    Q = p.load_keys(q_ref, rows, once=P_ref is None)
    KdS = KQ = 0.0
    for i, dS_i in enumerate(dS):
      KdS += dot(K(i), dS_i, parts)
      KQ += dot(K(i), Q(i), parts, NT) if P_ref is None else 0.0
      dstates_ref[n, b, h, p.key_blocks[i], p.cols] = dS_i.astype(dstates_ref.dtype)
    dO = do_ref[b, rows, h, p.cols]
    if P_ref is None:
      dY = dot((KQ * decay.score_factors(transposed=True) * scale).astype(k_ref.dtype), dO, parts)
    else:
      dY = dot(P_ref[n, b, h, :, :], dO, parts, TN)
    dY += scale_rows(KdS, decay.end)
    if X_ref is not None:
      dY, residual = times_inverse_split(load_inverse(X_ref, (n, b, h)), dY, parts, TN)
      dZ, residual = (scale_rows(scale_rows(x, beta), decay.start) for x in (dY, residual))
    dY_ref[b, rows, h, p.cols] = dY.astype(dY_ref.dtype)
    dO = scale_rows(dO.astype(F32), decay.start) * scale
    total = p.total_decays(n, decay, total_ref)
    new = []
    for i, dS_i in enumerate(dS):
      dS_i = dS_i if total[i] is None else dS_i * total[i]
      dS_i += dot(Q(i), dO, parts, TN)
      new.append(dS_i if X_ref is None else dS_i - dot(K_start(i), dZ, parts, TN, residual))
    return tuple(new)

  dS = lax.fori_loop(0, chunks, step, p.load_state(dS_ref))
  p.store_state(dS0_ref, dS)


def dstates(
  q, k, v, beta, X, P, g, segments, do, dS, decayed=None,
  *, chunk, scale, tile=None, interpret=False
):  # fmt: skip
  """Return dY = X^T dR [B L Hv dv], the gradient of the state after each chunk, and dS0.

  Without an X (linear attention) dY is dR, which is dv. The gradients of states are [N B Hv dk dv]
  in k's dtype. With per-channel gates `decayed` replaces q, k, g and segments.
  """
  per_channel = decayed is not None
  q, k, g, segments, total, k_start = decayed_inputs(q, k, g, segments, decayed)
  B, L, _, dk = k.shape
  Hv, dv = v.shape[2:]
  found = launch_over_chunks(
    "dstates",
    _dstates_body,
    dict(q=q, k=k, do=do, dS=dS, P=P, beta=beta, X=X, g=g, segments=segments)
    | dict(total=total, k_start=k_start),
    dict(
      dY=jax.ShapeDtypeStruct(v.shape, k.dtype),
      dstates=jax.ShapeDtypeStruct((L // chunk, B, Hv, dk, dv), k.dtype),
      dS0=jax.ShapeDtypeStruct((B, Hv, dk, dv), F32),
    ),
    v=v,
    chunk=chunk,
    scale=scale,
    tile=tile
    or tile_for(
      "dstates", k, gated=g is not None, delta_rule=X is not None, per_channel=per_channel
    ),
    interpret=interpret,
  )
  return found["dY"], found["dstates"], found["dS0"]
