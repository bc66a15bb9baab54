"""Gradients of queries, keys, values, beta and per-head gates on NVIDIA GPUs.

One program per (chunk, head), all in parallel, owns all of dk and dv. R, dY, the state before each
chunk and the gradient of the state after it come from `backward.py`.
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
from pallas_kernels.delta_rule.pallas_gpu.decay import (
  gate_gradient_from_rows,
  scale_rows,
  strict_lower,
)
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, NT, TN, dot
from pallas_kernels.delta_rule.pallas_gpu.tiles import tile_for


def _body(p, scale):
  has_g, dtype = p.dg_ref is not None, p.k_ref.dtype
  dP, dA, dbeta = score_gradients(p)

  def over_gram(i, KK):
    K = p.k_ref[*p.keys(i)]
    return KK + dot(K, K, p.parts, NT)

  # From here on dP, dA and dKK are gradients of Q K^T and K K^T before masks and decays.
  factors = p.decay.score_factors()
  dP = (dP * factors * scale).astype(dtype)
  # Gradient of b, the cumulative log decay: q_i and the correcting beta k_i have a factor e^{b_i},
  # the k_j that they multiply e^{-b_j}.
  db = p.zeros()
  if p.delta_rule:
    dA = strict_lower(dA * factors, p.iotas)
    KK = lax.fori_loop(0, p.key_blocks, over_gram, p.zeros(p.chunk))
    dbeta += jnp.sum(dA * KK, axis=1)
    dKK = dA * p.beta[:, None]
    if has_g:
      db += jnp.sum(dKK * KK, axis=1) - jnp.sum(dKK * KK, axis=0)
    # Strictly lower, so this sum is exact: one matmul replaces dKK K and dKK^T K.
    dKK = dKK.astype(dtype)
    dKK += dKK.T

  def over_keys(i, carry):
    correction, db, end_terms, trace = carry
    Q, K = p.q_ref[*p.keys(i)], p.k_ref[*p.keys(i)]
    dQ = scale_rows(p.times_states(p.do_ref, p.states_ref, i), p.decay.start) * scale
    dQ += dot(dP, K, p.parts)
    p.dq_ref[*p.head_keys(i)] = dQ.astype(p.dq_ref.dtype)
    dK = dot(dP, Q, p.parts, TN)
    if has_g:
      db += jnp.sum(dQ * Q.astype(F32) - dK * K.astype(F32), axis=1)
    dK_end = scale_rows(p.times_states(p.R_ref, p.dstates_ref, i), p.decay.end)
    if has_g:
      end_terms += jnp.sum(dK_end * K.astype(F32), axis=1)
    dK += dK_end
    if p.delta_rule:
      dK += dot(dKK, K, p.parts)
      dK_start = -scale_rows(p.times_states(p.dY_ref, p.states_ref, i), p.decay.start)
      # Of -e^b K S in Z = V - e^b K S: added to dbeta and, times beta, to db.
      correction += jnp.sum(dK_start * K.astype(F32), axis=1)
      dK += dK_start * p.beta[:, None]
    p.dk_ref[*p.head_keys(i)] = dK.astype(p.dk_ref.dtype)
    if has_g:

      def add_trace(j, trace):
        S = p.states_ref[*p.state(i, j)].astype(F32)
        return trace + jnp.sum(S * p.dstates_ref[*p.state(i, j)].astype(F32))

      trace = lax.fori_loop(0, p.value_blocks, add_trace, trace)
    return correction, db, end_terms, trace

  carry = (p.zeros(), db, p.zeros(), jnp.float32(0.0))
  correction, db, end_terms, trace = lax.fori_loop(0, p.key_blocks, over_keys, carry)
  if p.delta_rule:
    p.dbeta_ref[p.b, p.rows, p.h] = dbeta + correction
    db += correction * p.beta
  if has_g:
    dg = gate_gradient_from_rows(db, end_terms, trace * p.decay.total, p.iotas)
    p.dg_ref[p.b, p.rows, p.h] = dg


def grads(
  q, k, v, beta, g, segments, R, dY, do, states, dstates,
  *, chunk, scale, tile=None, interpret=False
):  # fmt: skip
  """Return (dq, dk, dv, dbeta, dg) in the input dtypes, dq and dk summed over shared key heads.

  For linear attention (beta is None) dv and dbeta are None: dv is the dY of `dstates`.
  """
  gated, delta_rule = g is not None, beta is not None
  outputs = key_gradient_shapes(k, v)
  if delta_rule:
    outputs |= dict(dv=v, dbeta=jax.ShapeDtypeStruct(beta.shape, F32))
  if g is not None:
    outputs["dg"] = jax.ShapeDtypeStruct(g.shape, F32)
  found = launch_per_chunk(
    "grads",
    _body,
    dict(q=q, k=k, v=v, do=do, states=states, dstates=dstates)
    | dict(beta=beta, R=R, dY=dY, g=g, segments=segments),
    outputs,
    tile=tile or tile_for("grads", k, gated=gated, delta_rule=delta_rule),
    chunk=chunk,
    per_channel=False,
    interpret=interpret,
    scale=scale,
  )
  dv, dbeta, dg = (found.get(name) for name in ("dv", "dbeta", "dg"))
  return input_gradients(k, found["dq"], found["dk"], dv, beta, dbeta, g, dg)
