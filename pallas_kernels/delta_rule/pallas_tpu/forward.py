"""Delta rule on TPU, forward: one kernel reads q, k, v, beta, g and writes o and the last state.

Grid (batch, head group, chunk); the state of a group stays in VMEM over its chunks. The heads of a
group are worked on stage by stage, so that one head's products hide the latency of another's.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.delta_rule.pallas_tpu.chunk import Decays, masked
from pallas_kernels.delta_rule.pallas_tpu.inverse import Inverse, unit_lower_inverse
from pallas_kernels.delta_rule.pallas_tpu.products import F32, NT, TN, gram, matmul
from pallas_kernels.delta_rule.pallas_tpu.tiles import block_specs, compiler_params


def _body(*refs, tile, with_S0, save):
  # q, k [C, key_heads*dk]; v, o [C, heads*dv]; rows [rows, C]; S [heads, dk, dv]; X [heads, C, C]
  q_ref, k_ref, v_ref, rows_ref, *refs = refs
  S0_ref = refs.pop(0) if with_S0 else None
  o_ref, S_ref, *saved_refs = refs

  @pl.when(pl.program_id(2) == 0)
  def _():
    S_ref[...] = S0_ref[...] if with_S0 else jnp.zeros_like(S_ref)

  dk, dv, kh, dtype = tile.dk, tile.dv, tile.key_head, k_ref.dtype
  heads, key_heads = range(tile.heads), range(tile.key_heads)
  decays = Decays(tile, rows_ref)
  each = lambda f: [f(h) for h in heads]
  keys = lambda f: [f(h) for h in key_heads]
  Q = keys(lambda h: q_ref[:, h * dk : (h + 1) * dk])
  K = keys(lambda h: k_ref[:, h * dk : (h + 1) * dk])
  KK, missing = zip(*keys(lambda h: gram(K[h])))
  D = each(decays.scores)
  A = each(lambda h: decays.erase(h, KK[kh(h)], D[h]))
  S = each(lambda h: S_ref[h])
  Sd = each(lambda h: S[h].astype(dtype))
  # Before the inverse: its substitution leaves the matrix units idle.
  KS = each(lambda h: matmul(K[kh(h)], Sd[h]))
  X = unit_lower_inverse(A, tile.base, tile.inverse_precision)
  X = each(lambda h: X[h].astype(dtype))
  inverse = each(lambda h: Inverse.of(X[h], A[h], decays.erase(h, missing[kh(h)], D[h])))
  QK = keys(lambda h: matmul(Q[h], K[h], NT))
  P = each(lambda h: masked(decays.lower, QK[kh(h)], D[h]).astype(dtype))
  QS = each(lambda h: matmul(Q[kh(h)], Sd[h]))
  if save:
    X_ref, states_ref = saved_refs
    for h in heads:
      X_ref[h] = X[h]
      states_ref[h] = Sd[h]
  carry = each(decays.carry)
  carried = tile.gated or tile.packed
  if carried:
    KS = each(lambda h: KS[h] * carry[h][0])
    QS = each(lambda h: QS[h] * carry[h][0])
    S = each(lambda h: S[h] * carry[h][2])
  V = each(lambda h: v_ref[:, h * dv : (h + 1) * dv].astype(F32))
  Y = each(lambda h: ((V[h] - KS[h]) * decays.beta(h)).astype(dtype))
  R, rest = zip(*each(lambda h: inverse[h].times(Y[h])))
  Rd = each(lambda h: R[h].astype(dtype))
  written, written_rest = Rd, rest
  if carried:
    written = each(lambda h: (R[h] * carry[h][1]).astype(dtype))
  if carried and dtype == F32:
    written_rest = each(lambda h: rest[h] * carry[h][1])
  for h in heads:
    O = QS[h] + matmul(P[h], Rd[h], rest=rest[h])
    O = O if tile.scale == 1.0 else O * tile.scale
    o_ref[:, h * dv : (h + 1) * dv] = O.astype(o_ref.dtype)
    S_ref[h] = S[h] + matmul(K[kh(h)], written[h], TN, rest=written_rest[h])


def forward(q, k, v, rows, S0, *, tile, save=False, interpret=False):
  """o, S (and X, the states before each chunk) from q, k [B, L, H*dk], v [B, L, Hv*dv] and rows.

  Args:
    rows: [B, N, Hv/heads, rows, C] float32: beta, coarse and fine cumulative log decay of each head
      of a group, number of the document within the chunk (0: the carried one).
    save: also return X = (I + A)^-1 [B, N, Hv, C, C] and S [B, N, Hv, dk, dv], in q's dtype.
  """
  B, N, J = rows.shape[:3]
  Hv = J * tile.heads
  spec = block_specs(tile)
  in_specs = [spec["key"], spec["key"], spec["value"], spec["rows"]]
  args = (q, k, v, rows)
  if S0 is not None:
    in_specs, args = [*in_specs, spec["state"]], (*args, S0)
  out_specs = [spec["value"], spec["state"]]
  out_shape = [
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    jax.ShapeDtypeStruct((B, Hv, tile.dk, tile.dv), F32),
  ]
  if save:
    out_specs += [spec["X"], spec["states"]]
    out_shape += [
      jax.ShapeDtypeStruct((B, N, Hv, tile.chunk, tile.chunk), q.dtype),
      jax.ShapeDtypeStruct((B, N, Hv, tile.dk, tile.dv), q.dtype),
    ]
  return pl.pallas_call(
    functools.partial(_body, tile=tile, with_S0=S0 is not None, save=save),
    grid=(B, J, N),
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=compiler_params(),
    interpret=interpret,
    name="delta_rule_fwd",
  )(*args)
