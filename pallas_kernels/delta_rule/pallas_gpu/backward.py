"""The state and its gradient over all chunks, for the backward on NVIDIA GPUs: two kernels.

states recomputes R and the state before each chunk. dstates carries dS over all chunks, last to
first, and writes it per chunk; `grads.py` then takes all chunks in parallel. Partial sums of dq and
dk over value blocks (one loop doing both) would move more: 8 dk bytes per token and block written
and read again, against 2 dk dv / C here.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.decay import (
  load_chunk,
  pick,
  program_ids,
  scale_rows,
)
from pallas_kernels.delta_rule.pallas_gpu.inverse import load_inverse, times_inverse_split
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, TN, dot
from pallas_kernels.delta_rule.pallas_gpu.per_channel_gate import decayed_inputs
from pallas_kernels.delta_rule.pallas_gpu.state_update import (
  first_state,
  load_keys,
  load_whole,
  next_state,
  writes,
)
from pallas_kernels.delta_rule.pallas_gpu.tiles import call, tile_for


def _states_body(k_ref, v_ref, *refs, given, group, chunk, block_k, block_v):
  # k [B L H dk], v [B L Hv dv], beta [B L Hv]?, X [N B Hv matrices C C]?, g [B L Hv]?,
  # segments [B L]?, whole and k_into of `Decayed`?, S0 [B Hv dk dv]?
  # -> states [N B Hv dk dv], with an X also R [B L Hv dv]
  beta_ref, X_ref, g_ref, segments_ref, whole_ref, into_ref, refs = pick(refs, *given)
  R_ref = refs.pop() if X_ref is not None else None
  states_ref = refs.pop()
  j, h, b, hk = program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  parts = parts_for(k_ref.dtype)

  def step(n, S):
    rows, beta, _, _, decay = load_chunk(k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk)
    K = load_keys(k_ref, (b, rows, hk), key_blocks)
    K_into = K if into_ref is None else load_keys(into_ref, (b, rows, hk), key_blocks)
    KS = 0.0
    if X_ref is not None:
      for i, S_i in enumerate(S):
        KS += dot(K_into(i), S_i, parts)
    R, rest = writes(v_ref[b, rows, h, cols], KS, beta, decay, X_ref, (n, b, h), parts)
    if X_ref is not None:
      R_ref[b, rows, h, cols] = R.astype(R_ref.dtype)
    for S_i, keys in zip(S, key_blocks):
      states_ref[n, b, h, keys, cols] = S_i.astype(states_ref.dtype)
    whole = load_whole(decay, whole_ref, (n, b, h), key_blocks)
    return next_state(S, K, R, rest, decay, whole, parts)

  S = first_state(refs, b, h, key_blocks, cols)
  lax.fori_loop(0, k_ref.shape[1] // chunk, step, S)


def states(k, v, beta, X, g, segments, S0, decayed=None, *, chunk, tile=None, interpret=False):
  """The state before each chunk [N B Hv dk dv] and, with an X, R [B L Hv dv], both in k's dtype.

  The backward's products round both to k's dtype anyway, so bfloat16 inputs lose nothing by it.
  Where channels decay, `decayed` takes the place of k, g and segments.
  """
  channels = decayed is not None
  _, k, g, segments, whole, k_into = decayed_inputs(None, k, g, segments, decayed)
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  tile = tile or tile_for("states", k, delta_rule=X is not None, channels=channels)
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    _states_body,
    given=[x is not None for x in (beta, X, g, segments, whole, k_into)],
    group=Hv // H,
    chunk=chunk,
    block_k=min(tile.block_k, dk),
    block_v=block_v,
  )
  out_shape = [jax.ShapeDtypeStruct((L // chunk, B, Hv, dk, dv), k.dtype)]
  if X is not None:
    out_shape.append(jax.ShapeDtypeStruct(v.shape, k.dtype))
  options = dict(
    grid=(dv // block_v, Hv, B), tile=tile, interpret=interpret, delta_rule=X is not None
  )
  args = (k, v, beta, X, g, segments, whole, k_into, S0)
  return call("states", body, args, out_shape, **options)


def _dstates_body(
  q_ref, k_ref, do_ref, dS_ref, *refs, given, group, chunk, scale, block_k, block_v
):
  # do [B L Hv dv], dS [B Hv dk dv], P [N B Hv C C]?, beta?, X [N B Hv matrices C C]?, g?,
  # segments?, whole and k_into of `Decayed`?
  # -> dY [B L Hv dv], dstates [N B Hv dk dv] (of the state after each chunk), dS0 [B Hv dk dv]
  P_ref, beta_ref, X_ref, g_ref, segments_ref, whole_ref, into_ref, refs = pick(refs, *given)
  dY_ref, dstates_ref, dS0_ref = refs
  j, h, b, hk = program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  parts = parts_for(k_ref.dtype)
  chunks = k_ref.shape[1] // chunk

  def step(done, dS):
    n = chunks - 1 - done
    rows, beta, _, _, decay = load_chunk(k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk)
    K = load_keys(k_ref, (b, rows, hk), key_blocks)
    K_into = K if into_ref is None else load_keys(into_ref, (b, rows, hk), key_blocks)
    # Read once for scores in place; elsewhere late, so that it is not kept from here on.
    Q = load_keys(q_ref, (b, rows, hk), key_blocks, once=P_ref is None)
    KdS = KQ = 0.0
    for i, dS_i in enumerate(dS):
      KdS += dot(K(i), dS_i, parts)
      KQ += dot(K(i), Q(i), parts, NT) if P_ref is None else 0.0
      dstates_ref[n, b, h, key_blocks[i], cols] = dS_i.astype(dstates_ref.dtype)
    dO = do_ref[b, rows, h, cols]
    if P_ref is None:
      dY = dot((KQ * decay.inside(transposed=True) * scale).astype(k_ref.dtype), dO, parts)
    else:
      dY = dot(P_ref[n, b, h, :, :], dO, parts, TN)
    dY += scale_rows(KdS, decay.end)
    if X_ref is not None:
      dY, rest = times_inverse_split(load_inverse(X_ref, (n, b, h)), dY, parts, TN)
      dZ, rest = (scale_rows(scale_rows(x, beta), decay.start) for x in (dY, rest))
    dY_ref[b, rows, h, cols] = dY.astype(dY_ref.dtype)
    dO = scale_rows(dO.astype(F32), decay.start) * scale
    whole = load_whole(decay, whole_ref, (n, b, h), key_blocks)
    new = []
    for i, dS_i in enumerate(dS):
      kept = dS_i if whole[i] is None else dS_i * whole[i]
      kept += dot(Q(i), dO, parts, TN)
      new.append(kept if X_ref is None else kept - dot(K_into(i), dZ, parts, TN, rest))
    return tuple(new)

  dS = tuple(dS_ref[b, h, keys, cols] for keys in key_blocks)
  dS = lax.fori_loop(0, chunks, step, dS)
  for dS_i, keys in zip(dS, key_blocks):
    dS0_ref[b, h, keys, cols] = dS_i


def dstates(
  q, k, v, beta, X, P, g, segments, do, dS, decayed=None,
  *, chunk, scale, tile=None, interpret=False
):  # fmt: skip
  """dY = X^T dR [B L Hv dv], d(state after each chunk) [N B Hv dk dv] in k's dtype, and dS0.

  Of linear attention, without an X, dR alone, which is dv. Where channels decay, `decayed` takes
  the place of q, k, g and segments.
  """
  channels = decayed is not None
  q, k, g, segments, whole, k_into = decayed_inputs(q, k, g, segments, decayed)
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  full, delta_rule = g is not None, X is not None
  tile = tile or tile_for("dstates", k, full=full, delta_rule=delta_rule, channels=channels)
  block_v = min(tile.block_v, dv)
  body = functools.partial(
    _dstates_body,
    given=[x is not None for x in (P, beta, X, g, segments, whole, k_into)],
    group=Hv // H,
    chunk=chunk,
    scale=scale,
    block_k=min(tile.block_k, dk),
    block_v=block_v,
  )
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, k.dtype),
    jax.ShapeDtypeStruct((L // chunk, B, Hv, dk, dv), k.dtype),
    jax.ShapeDtypeStruct((B, Hv, dk, dv), F32),
  ]
  options = dict(
    grid=(dv // block_v, Hv, B), tile=tile, interpret=interpret, delta_rule=X is not None
  )
  args = (q, k, do, dS, P, beta, X, g, segments, whole, k_into)
  return call("dstates", body, args, out_shape, **options)
