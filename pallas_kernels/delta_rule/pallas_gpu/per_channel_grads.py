"""Gradients with gates of key channels on NVIDIA GPUs, in two kernels.

dscores takes those of the scores and of the values, grads from there those of queries, keys and
gates, a block of channels at a time. In one kernel the scores' would stay in registers beside three
sums of a block, and spill: they are read again for each size of blocks instead.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.pallas_gpu.chunk_program import in_dtypes, key_shapes, of_scores, run
from pallas_kernels.delta_rule.pallas_gpu.decay import scale_rows, strict_lower
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, dot
from pallas_kernels.delta_rule.pallas_gpu.per_channel_gate import Gate, gate_parts
from pallas_kernels.delta_rule.pallas_gpu.tiles import tile_for


def _dscores_body(p, scale):
  """Writes dP, dA of the delta rule, with their transposes above the diagonal; dv and dbeta."""
  dP, dA, dbeta = of_scores(p)
  inside = p.decay.inside()
  at, (row, column) = (p.n, p.b, p.h, slice(None), slice(None)), p.iotas
  dP = (dP * inside * scale).astype(p.dP.dtype)
  p.dP[*at] = jnp.where(row >= column, dP, dP.T)
  if p.delta_rule:
    dA = strict_lower(dA * inside, p.iotas).astype(p.dA.dtype)
    p.dA[*at] = dA + dA.T
    p.dbeta[p.b, p.rows, p.h] = dbeta


def _load(p, i, number):
  """Q, K float32 and the gate of block i.

  Loaded wherever they are used, as the number tells the compiler: in registers they would spill.
  """
  b, cols = p.row_for(number), p.keys(i)[3]
  Q, K = (ref[b, p.rows, p.hk, cols].astype(F32) for ref in (p.q, p.k))
  g = p.g[b, p.rows, p.h, cols]
  return Q, K, Gate(g, number, p.iotas, p.zero, gate_parts(p.k.dtype))


def _met(p, i, dQ, dF):
  """dQ, dF with what the scores add, and dK of the keys that they meet: [C block_k] each.

  F are the keys that erase, beta k.
  """
  of_block = lax.broadcasted_iota(jnp.int32, dQ.shape, 0)

  def over_levels(level, carry):
    dQ, dF, dK = carry
    Q, K, gate = _load(p, i, level)
    meeting, pairs = gate.meeting(level), gate.pairs(level)
    later = (((of_block + p.zero * level) >> level) & 1) == 1

    def both(F, dscores_ref):
      dP = dscores_ref[p.n, p.row_for(level), p.h, :, :]
      met = (jnp.where(later, F, K) * meeting).astype(dP.dtype)
      return dot(jnp.where(pairs, dP, jnp.zeros_like(dP)), met, p.parts) * meeting

    x = both(Q, p.dP)
    dQ += jnp.where(later, x, 0.0)
    dK += jnp.where(later, 0.0, x)
    if p.delta_rule:
      x = both(scale_rows(K, p.beta), p.dA)
      dF += jnp.where(later, x, 0.0)
      dK += jnp.where(later, 0.0, x)
    return dQ, dF, dK

  levels = p.chunk.bit_length() - 1
  return lax.fori_loop(0, levels, over_levels, (dQ, dF, p.zeros(p.block_k)))


def _grads_body(p, scale):
  """Writes dq, dk, dg and what is left of dbeta.

  q_i and the erasing beta k_i stand beside e^{b_i}, the k_j that they meet beside e^{-b_j}: the
  gradient of b is their own times what they are. A written k_i stands beside e^{b_C - b_i}, the
  gates of all later tokens.
  """
  row, column = p.iotas
  diagonal = jnp.where(row == column, p.dP[p.n, p.b, p.h, :, :].astype(F32), 0.0)
  # A token's own score has no decay; among the others its terms in b would cancel by rounding.
  own = jnp.sum(diagonal, axis=1)[:, None]

  def over_keys(i, dbeta):
    _, _, gate = _load(p, i, i + 1)
    into = scale_rows(gate.into(), p.decay.start)
    dQ = p.product(p.do, p.states, i) * into * scale
    dF = -p.product(p.dY, p.states, i) * into if p.delta_rule else None
    dQ, dF, dK = _met(p, i, dQ, dF)
    Q, K, gate = _load(p, i, i + 2)
    p.dq[*p.keys(i, False)] = (dQ + own * K).astype(p.dq.dtype)
    db = Q * dQ - K * dK
    dK += own * Q
    if p.delta_rule:
      dbeta += jnp.sum(K * dF, axis=1)
      dF *= p.beta[:, None]
      db += K * dF
      dK += dF
    write = p.product(p.R, p.dstates, i) * scale_rows(gate.out(), p.decay.end)
    p.dk[*p.keys(i, False)] = (dK + write).astype(p.dk.dtype)

    def trace(j, whole):
      S = p.states[*p.state(i, j)].astype(F32)
      return whole + jnp.sum(S * p.dstates[*p.state(i, j)].astype(F32), axis=1)

    whole = lax.fori_loop(0, p.value_blocks, trace, jnp.zeros((p.block_k,), F32))
    whole *= gate.whole() * (1.0 if p.decay.whole is None else p.decay.whole)
    row = p.iotas[0] + p.zero * (i + 3)
    dg = gate.sums(row <= column, db)
    row = p.iotas[0] + p.zero * (i + 4)  # its own mask, as in `Gate`
    dg += gate.sums(row > column, K * write)
    p.dg[*p.keys(i, False)] = dg + whole[None, :]
    return dbeta

  dbeta = lax.fori_loop(0, p.key_blocks, over_keys, p.zeros() if p.delta_rule else None)
  if p.delta_rule:
    p.dbeta[p.b, p.rows, p.h] = dbeta


def grads(q, k, v, beta, g, segments, R, dY, do, states, dstates, *, scale, chunk, interpret=False):
  """(dq, dk, dv, dbeta, dg) as `grads.grads`, with g [B L Hv dk]."""
  B, L, Hv, _ = v.shape
  delta_rule = beta is not None
  options = dict(chunk=chunk, channels=True, interpret=interpret, scale=scale)
  tile = lambda kernel: tile_for(kernel, k, delta_rule=delta_rule, channels=True)
  of_rule = dict(beta=beta, R=R, dY=dY, segments=segments)
  square = jax.ShapeDtypeStruct((L // chunk, B, Hv, chunk, chunk), k.dtype)
  of_beta = jax.ShapeDtypeStruct((B, L, Hv), F32)
  outputs = dict(dP=square) | (dict(dA=square, dv=v, dbeta=of_beta) if delta_rule else {})
  inputs = dict(v=v, do=do) | of_rule
  scores = run("dscores", _dscores_body, inputs, outputs, tile=tile("dscores"), **options)
  outputs = key_shapes(k, v) | (dict(dbeta=of_beta) if delta_rule else {})
  outputs["dg"] = jax.ShapeDtypeStruct(g.shape, F32)
  inputs = dict(q=q, k=k, v=v, do=do, states=states, dstates=dstates, g=g) | of_rule
  inputs |= dict(dP=scores["dP"], dA=scores.get("dA"))
  found = run("grads", _grads_body, inputs, outputs, tile=tile("grads"), **options)
  dbeta = scores["dbeta"] + found["dbeta"] if delta_rule else None
  return in_dtypes(k, found, scores.get("dv"), beta, dbeta, g)
