"""Gradients with per-channel gates on NVIDIA GPUs, in two kernels.

`dscores` computes the gradients of scores and values; `grads` then those of queries, keys and
gates, one block of channels at a time. In one kernel the score gradients would stay in registers
next to three accumulators of a block, and spill; they are read again for each block size instead.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.pallas_gpu.chunk_program import (
  input_gradients,
  key_gradient_shapes,
  launch_per_chunk,
  score_gradients,
)
from pallas_kernels.delta_rule.pallas_gpu.decay import scale_rows, strict_lower
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, dot
from pallas_kernels.delta_rule.pallas_gpu.per_channel_gate import ChannelGate, gate_parts
from pallas_kernels.delta_rule.pallas_gpu.tiles import tile_for


def _dscores_body(p, scale):
  """Store dP and, for the delta rule, dA, dv and dbeta; transposes above the diagonal of dP, dA."""
  dP, dA, dbeta = score_gradients(p)
  factors = p.decay.score_factors()
  at, (row, column) = (p.n, p.b, p.h, slice(None), slice(None)), p.iotas
  dP = (dP * factors * scale).astype(p.dP_ref.dtype)
  p.dP_ref[*at] = jnp.where(row >= column, dP, dP.T)
  if p.delta_rule:
    dA = strict_lower(dA * factors, p.iotas).astype(p.dA_ref.dtype)
    p.dA_ref[*at] = dA + dA.T
    p.dbeta_ref[p.b, p.rows, p.h] = dbeta


def _load(p, i, load_id):
  """Return Q, K float32 and the gate of key block i.

  Loaded wherever they are used (a different `load_id` each): in registers they would spill.
  """
  b, cols = p.opaque_b(load_id), p.keys(i)[3]
  Q, K = (ref[b, p.rows, p.hk, cols].astype(F32) for ref in (p.q_ref, p.k_ref))
  g = p.g_ref[b, p.rows, p.h, cols]
  return Q, K, ChannelGate(g, load_id, p.iotas, p.zero, gate_parts(p.k_ref.dtype))


def _add_score_gradients(p, i, dQ, dF):
  """Return dQ and dF plus their gradients by scores, and dK of the scores' right operand.

  F = beta K is the left operand of A = F K^T. All are [C block_k].
  """
  token = lax.broadcasted_iota(jnp.int32, dQ.shape, 0)

  def over_levels(level, carry):
    dQ, dF, dK = carry
    Q, K, gate = _load(p, i, level)
    decay, pairs = gate.to_boundary(level), gate.pairs(level)
    second_half = (((token + p.zero * level) >> level) & 1) == 1

    def gradients(F, dscores_ref):
      """Return dF in second halves of blocks and dK in first halves."""
      dP = dscores_ref[p.n, p.opaque_b(level), p.h, :, :]
      halves = (jnp.where(second_half, F, K) * decay).astype(dP.dtype)
      return dot(jnp.where(pairs, dP, jnp.zeros_like(dP)), halves, p.parts) * decay

    x = gradients(Q, p.dP_ref)
    dQ += jnp.where(second_half, x, 0.0)
    dK += jnp.where(second_half, 0.0, x)
    if p.delta_rule:
      x = gradients(scale_rows(K, p.beta), p.dA_ref)
      dF += jnp.where(second_half, x, 0.0)
      dK += jnp.where(second_half, 0.0, x)
    return dQ, dF, dK

  levels = p.chunk.bit_length() - 1
  return lax.fori_loop(0, levels, over_levels, (dQ, dF, p.zeros(p.block_k)))


def _grads_body(p, scale):
  """Store dq, dk, dg and the remaining part of dbeta.

  q_i and the correcting beta k_i have a factor e^{b_i}, the k_j that they multiply e^{-b_j}: the
  gradient of b is each operand times its own gradient. A written k_i has a factor e^{b_C - b_i},
  the gates of all later tokens.
  """
  row, column = p.iotas
  diagonal = jnp.where(row == column, p.dP_ref[p.n, p.b, p.h, :, :].astype(F32), 0.0)
  # The score of a token with itself has no decay. Added later: in db its two terms would cancel
  # only up to rounding.
  diagonal = jnp.sum(diagonal, axis=1)[:, None]

  def over_keys(i, dbeta):
    _, _, gate = _load(p, i, i + 1)
    start = scale_rows(gate.start(), p.decay.start)
    dQ = p.times_states(p.do_ref, p.states_ref, i) * start * scale
    dF = -p.times_states(p.dY_ref, p.states_ref, i) * start if p.delta_rule else None
    dQ, dF, dK = _add_score_gradients(p, i, dQ, dF)
    Q, K, gate = _load(p, i, i + 2)
    p.dq_ref[*p.head_keys(i)] = (dQ + diagonal * K).astype(p.dq_ref.dtype)
    db = Q * dQ - K * dK
    dK += diagonal * Q
    if p.delta_rule:
      dbeta += jnp.sum(K * dF, axis=1)
      dF *= p.beta[:, None]
      db += K * dF
      dK += dF
    write = p.times_states(p.R_ref, p.dstates_ref, i) * scale_rows(gate.end(), p.decay.end)
    p.dk_ref[*p.head_keys(i)] = (dK + write).astype(p.dk_ref.dtype)

    def add_trace(j, trace):
      S = p.states_ref[*p.state(i, j)].astype(F32)
      return trace + jnp.sum(S * p.dstates_ref[*p.state(i, j)].astype(F32), axis=1)

    trace = lax.fori_loop(0, p.value_blocks, add_trace, jnp.zeros((p.block_k,), F32))
    trace *= gate.total() * (1.0 if p.decay.total is None else p.decay.total)
    row = p.iotas[0] + p.zero * (i + 3)
    dg = gate.masked_sums(row <= column, db)
    row = p.iotas[0] + p.zero * (i + 4)  # a mask of its own, see `ChannelGate`
    dg += gate.masked_sums(row > column, K * write)
    p.dg_ref[*p.head_keys(i)] = dg + trace[None, :]
    return dbeta

  dbeta = lax.fori_loop(0, p.key_blocks, over_keys, p.zeros() if p.delta_rule else None)
  if p.delta_rule:
    p.dbeta_ref[p.b, p.rows, p.h] = dbeta


def grads(q, k, v, beta, g, segments, R, dY, do, states, dstates, *, scale, chunk, interpret=False):
  """Return (dq, dk, dv, dbeta, dg) like `grads.grads`, for g [B L Hv dk]."""
  B, L, Hv, _ = v.shape
  delta_rule = beta is not None
  options = dict(chunk=chunk, per_channel=True, interpret=interpret, scale=scale)
  tile = lambda kernel: tile_for(kernel, k, delta_rule=delta_rule, per_channel=True)
  shared = dict(beta=beta, R=R, dY=dY, segments=segments)
  square = jax.ShapeDtypeStruct((L // chunk, B, Hv, chunk, chunk), k.dtype)
  per_token = jax.ShapeDtypeStruct((B, L, Hv), F32)
  outputs = dict(dP=square) | (dict(dA=square, dv=v, dbeta=per_token) if delta_rule else {})
  inputs = dict(v=v, do=do) | shared
  scores = launch_per_chunk(
    "dscores", _dscores_body, inputs, outputs, tile=tile("dscores"), **options
  )
  outputs = key_gradient_shapes(k, v) | (dict(dbeta=per_token) if delta_rule else {})
  outputs["dg"] = jax.ShapeDtypeStruct(g.shape, F32)
  inputs = dict(q=q, k=k, v=v, do=do, states=states, dstates=dstates, g=g) | shared
  inputs |= dict(dP=scores["dP"], dA=scores.get("dA"))
  found = launch_per_chunk("grads", _grads_body, inputs, outputs, tile=tile("grads"), **options)
  dbeta = scores["dbeta"] + found["dbeta"] if delta_rule else None
  dv = scores.get("dv")
  return input_gradients(k, found["dq"], found["dk"], dv, beta, dbeta, g, found["dg"])
