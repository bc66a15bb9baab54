"""Gradients of queries, keys, values and gates on NVIDIA GPUs: all chunks in parallel.

One program per (chunk, head), which owns all of dk and dv. R, dY, the state before each chunk and
the gradient of that after it come from `backward.py`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.pallas_gpu.chunk_program import in_dtypes, key_shapes, of_scores, run
from pallas_kernels.delta_rule.pallas_gpu.decay import (
  row_gates,
  scale_rows,
  strict_lower,
)
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, TN, dot
from pallas_kernels.delta_rule.pallas_gpu.tiles import tile_for


def _body(p, scale):
  has_g, dtype = p.dg is not None, p.k.dtype
  dP, dA, dbeta = of_scores(p)

  def over_gram(i, G):
    K = p.k[*p.keys(i)]
    return G + dot(K, K, p.parts, NT)

  # From here on dP, dA and dG are gradients of Q K^T and K K^T before masks and decays.
  inside = p.decay.inside()
  dP = (dP * inside * scale).astype(dtype)
  # The gradient of b, the summed log decay: q_i and the erasing beta k_i stand beside e^{b_i}, the
  # k_j that they meet beside e^{-b_j}.
  db = p.zeros()
  if p.delta_rule:
    dA = strict_lower(dA * inside, p.iotas)
    G = lax.fori_loop(0, p.key_blocks, over_gram, p.zeros(p.chunk))
    dbeta += jnp.sum(dA * G, axis=1)
    dG = dA * p.beta[:, None]
    if has_g:
      db += jnp.sum(dG * G, axis=1) - jnp.sum(dG * G, axis=0)
    # Strictly lower, so that the sum is exact: one product takes the place of dG K and dG^T K.
    dG = dG.astype(dtype)
    dG += dG.T

  def over_keys(i, carry):
    erased, db, end_terms, whole = carry
    Q, K = p.q[*p.keys(i)], p.k[*p.keys(i)]
    dQ = scale_rows(p.product(p.do, p.states, i), p.decay.start) * scale
    dQ += dot(dP, K, p.parts)
    p.dq[*p.keys(i, False)] = dQ.astype(p.dq.dtype)
    dK = dot(dP, Q, p.parts, TN)
    if has_g:
      db += jnp.sum(dQ * Q.astype(F32) - dK * K.astype(F32), axis=1)
    dK_end = scale_rows(p.product(p.R, p.dstates, i), p.decay.end)
    if has_g:
      end_terms += jnp.sum(dK_end * K.astype(F32), axis=1)
    dK += dK_end
    if p.delta_rule:
      dK += dot(dG, K, p.parts)
      dK_start = -scale_rows(p.product(p.dY, p.states, i), p.decay.start)
      # -e^b K S in Z, seen from dY: its part of dbeta, and with beta of the gate's gradient.
      erased += jnp.sum(dK_start * K.astype(F32), axis=1)
      dK += dK_start * p.beta[:, None]
    p.dk[*p.keys(i, False)] = dK.astype(p.dk.dtype)
    if has_g:

      def trace(j, whole):
        S = p.states[*p.state(i, j)].astype(F32)
        return whole + jnp.sum(S * p.dstates[*p.state(i, j)].astype(F32))

      whole = lax.fori_loop(0, p.value_blocks, trace, whole)
    return erased, db, end_terms, whole

  carry = (p.zeros(), db, p.zeros(), jnp.float32(0.0))
  erased, db, end_terms, whole = lax.fori_loop(0, p.key_blocks, over_keys, carry)
  if p.delta_rule:
    p.dbeta[p.b, p.rows, p.h] = dbeta + erased
    db += erased * p.beta
  if has_g:
    p.dg[p.b, p.rows, p.h] = row_gates(db, end_terms, whole * p.decay.whole, p.iotas)


def grads(
  q, k, v, beta, g, segments, R, dY, do, states, dstates,
  *, chunk, scale, tile=None, interpret=False
):  # fmt: skip
  """(dq, dk, dv, dbeta, dg) in the inputs' dtypes; dq and dk summed over a key's value heads.

  Of linear attention, beta None, there is no dbeta, and dv is what `dstates` calls dY.
  """
  full, delta_rule = g is not None, beta is not None
  of_rule = dict(beta=beta, R=R, dY=dY, g=g, segments=segments)
  outputs = key_shapes(k, v)
  if delta_rule:
    outputs |= dict(dv=v, dbeta=jax.ShapeDtypeStruct(beta.shape, F32))
  if g is not None:
    outputs["dg"] = jax.ShapeDtypeStruct(g.shape, F32)
  found = run(
    "grads",
    _body,
    dict(q=q, k=k, v=v, do=do, states=states, dstates=dstates) | of_rule,
    outputs,
    tile=tile or tile_for("grads", k, full=full, delta_rule=delta_rule),
    chunk=chunk,
    channels=False,
    interpret=interpret,
    scale=scale,
  )
  return in_dtypes(k, found, found.get("dv"), beta, found.get("dbeta"), g)
