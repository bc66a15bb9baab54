"""Backward kernel on TPU: walks the chunks from the last to the first.

It reads the inputs, the gradient of o and the residuals of each chunk: the state before it and, for
the delta rule, X = (I + A)^-1. Scores and R are recomputed. dS stays in VMEM.

Lists have one entry per state of the program.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.tiling import SUBLANES
from pallas_kernels.delta_rule.pallas_tpu.decay import (
  Decays,
  columns_to_rows,
  load_decays,
  rows_to_columns,
  scaled,
)
from pallas_kernels.delta_rule.pallas_tpu.inverse import Inverse
from pallas_kernels.delta_rule.pallas_tpu.matmul import F32, NT, TN, matmul
from pallas_kernels.delta_rule.pallas_tpu.per_channel_gate import reverse_cumsum
from pallas_kernels.delta_rule.pallas_tpu.tiles import DeltaTileTPU, block_specs, compiler_params

Arrays = list[jax.Array]


class _Chunk(NamedTuple):
  """Inputs and decays of one chunk."""

  tile: DeltaTileTPU
  decays: Decays
  D: list  # score factors of per-head gates, or Nones
  start: list  # carry factors, or Nones
  end: list
  total: list
  Q: Arrays
  K: Arrays
  V: Arrays
  dO: Arrays  # gradient of o, times its scale
  S: Arrays  # state before the chunk, in the inputs' dtype
  dS: Arrays  # gradient of the state after the chunk, float32
  dS_cast: Arrays  # dS in the inputs' dtype

  # Per-head factors scale rows of matmuls with the state. Per-channel ones scale q and k instead.
  @property
  def row_start(self):
    return [None] if self.tile.per_channel else self.start

  @property
  def row_end(self):
    return [None] if self.tile.per_channel else self.end


class _Recomputed(NamedTuple):
  """Values of the forward pass. Those of the delta rule are None for linear attention."""

  Q_read: Arrays  # queries and keys as they multiply the state before the chunk
  K_read: Arrays
  K_write: Arrays  # keys as they are written to the state after the chunk
  P: Arrays  # masked and decayed scores Q K^T
  R: Arrays  # values written to the state: X (beta Z), for linear attention V
  beta: Arrays | None
  KK: Arrays | None  # scores K K^T
  X: list[Inverse] | None
  Z: Arrays | None  # V - K S, the values before the correction matrix


class _ValueGradients(NamedTuple):
  """Gradients of V and of Y = beta Z. For linear attention only V is set."""

  V: Arrays  # float32
  V_cast: Arrays | None  # in the inputs' dtype
  Y: Arrays | None  # float32
  Y_cast: Arrays | None
  Y_residual: list  # digits of Y below float32, or Nones


class _KeyGradients(NamedTuple):
  """Gradients of keys by their role."""

  write: Arrays  # written to the state for later chunks
  score: Arrays  # right operand of Q K^T and K K^T, read by later tokens of the chunk
  correction: Arrays | None  # left operand of K K^T and K S, the delta-rule correction at its token


def _body(*refs, tile):
  # q, k [sequences, C, key_heads*dk]; v, do [sequences, C, heads*dv]; rows [rows, C];
  # S [sequences, heads, dk, dv]; X [sequences, heads, C, C]
  q_ref, k_ref, v_ref, do_ref, dS_last_ref, S_ref, *refs = refs
  X_ref = refs.pop(0) if tile.delta_rule else None
  rows_ref = refs.pop(0) if tile.row_count else None
  gate_ref = refs.pop(0) if tile.per_channel else None
  dq_ref, dk_ref, dv_ref, dS_ref, *refs = refs
  drows_ref = refs.pop(0) if tile.delta_rule or tile.gate_rows else None
  dgate_ref = refs.pop(0) if tile.per_channel else None

  @pl.when(pl.program_id(2) == 0)
  def _():
    dS_ref[...] = dS_last_ref[...]

  decays = load_decays(tile, rows_ref, gate_ref)
  c, Q_keys, K_keys = _load_chunk(tile, decays, q_ref, k_ref, v_ref, do_ref, S_ref, dS_ref)
  f = _recompute(c, Q_keys, K_keys, X_ref)
  states = range(tile.states)

  d = _value_gradients(c, f)
  dO_state = c.dO
  if c.row_start[0] is not None:
    dO_state = _cast(scaled([x.astype(F32) for x in c.dO], c.row_start), c)

  # Gradients of the scores, then of queries and keys.
  dP = [matmul(do, r, NT) for do, r in zip(c.dO, f.R)]
  dKK = dKK_raw = None
  if tile.delta_rule:
    dA = [-matmul(dy, r, NT) for dy, r in zip(d.Y_cast, f.R)]
    dKK_raw = [decays.strict(u, dA[u], c.D[u]) for u in states]
    dKK = [x * beta for x, beta in zip(dKK_raw, f.beta)]
  of_queries = _query_gradients_per_channel if tile.per_channel else _query_gradients
  dQ, dK_score = of_queries(c, f, dP, dO_state)
  dK_write = scaled([matmul(r, ds, NT) for r, ds in zip(f.R, c.dS_cast)], c.end)
  dK_correction, dV_state = None, None
  if tile.delta_rule:
    of_keys = _correction_gradients_per_channel if tile.per_channel else _correction_gradients
    dK_correction, dK_score, dV_state = of_keys(c, f, d, dKK, dK_score)
  dK_parts = _KeyGradients(dK_write, dK_score, dK_correction)
  dK = [write + score for write, score in zip(dK_write, dK_score)]
  if tile.delta_rule:
    dK = [correction + x for correction, x in zip(dK_correction, dK)]

  for i in range(tile.key_count):
    own = [u for u in states if tile.key_of(u) == i]
    dq_ref[tile.key_slice(i)] = sum(dQ[u] for u in own).astype(dq_ref.dtype)
    dk_ref[tile.key_slice(i)] = sum(dK[u] for u in own).astype(dk_ref.dtype)
  for u in states:
    dv_ref[tile.value_slice(u)] = d.V[u].astype(dv_ref.dtype)
  dbeta = []
  if tile.delta_rule:
    dbeta = [_row_sums(d.Y[u] * f.Z[u], dKK_raw[u] * f.KK[u]) for u in states]
  if drows_ref is not None:
    drows_ref[...] = _row_gradients(c, dQ, dK_parts, dbeta)
  if tile.per_channel:
    _store_channel_gate_gradients(dgate_ref, c, dQ, dK_parts)
    dS = scaled(c.dS, rows_to_columns(c.total))
  else:
    dS = scaled(c.dS, c.total)

  # Gradient of the state before the chunk.
  residual = d.Y_residual
  if residual[0] is not None:
    residual = scaled([x * beta for x, beta in zip(residual, f.beta)], c.row_start)
  for u in states:
    dS_u = dS[u] + matmul(f.Q_read[u], dO_state[u], TN)
    if tile.delta_rule:
      dS_u = dS_u - matmul(f.K_read[u], dV_state[u], TN, residual=residual[u])
    dS_ref[tile.state_index(u)] = dS_u


def _cast(x, c):
  """Return the arrays x in the inputs' dtype."""
  return [y.astype(c.K[0].dtype) for y in x]


def _load_chunk(tile, decays, q_ref, k_ref, v_ref, do_ref, S_ref, dS_ref):
  """Return the `_Chunk`, and its queries and keys per key head."""
  states, dtype = range(tile.states), k_ref.dtype
  start, end, total = zip(*[decays.carry_factors(u) for u in states])
  D = [decays.score_factors(u) for u in states]
  Q = [q_ref[tile.key_slice(i)] for i in range(tile.key_count)]
  K = [k_ref[tile.key_slice(i)] for i in range(tile.key_count)]
  V = [v_ref[tile.value_slice(u)] for u in states]
  dO = [do_ref[tile.value_slice(u)] for u in states]
  if tile.scale != 1.0:
    dO = [x.astype(dtype) for x in [x.astype(F32) * tile.scale for x in dO]]
  S = [S_ref[tile.state_index(u)] for u in states]
  dS = [dS_ref[tile.state_index(u)] for u in states]
  dSd = [x.astype(dtype) for x in dS]
  Qs, Ks = ([x[tile.key_of(u)] for u in states] for x in (Q, K))
  return _Chunk(tile, decays, D, start, end, total, Qs, Ks, V, dO, S, dS, dSd), Q, K


def _recompute(c, Q_keys, K_keys, X_ref) -> _Recomputed:
  tile, decays, states = c.tile, c.decays, range(c.tile.states)
  Q_read, K_read, K_write = c.Q, c.K, c.K
  if tile.per_channel:
    decayed = lambda x, factors: _cast(scaled([y.astype(F32) for y in x], factors), c)
    Q_read, K_read, K_write = decayed(c.Q, c.start), decayed(c.K, c.start), decayed(c.K, c.end)
  beta = KK = X = Z = None
  if tile.delta_rule:
    beta = [decays.beta(u) for u in states]
    KK, X = _load_inverse(c, K_keys, X_ref)
  QK = decays.query_scores(Q_keys, K_keys)
  P = [decays.lower(u, QK[u], c.D[u]).astype(c.K[0].dtype) for u in states]
  R = c.V
  if tile.delta_rule:
    KS = scaled([matmul(k, s) for k, s in zip(K_read, c.S)], c.row_start)
    Z = [v.astype(F32) - ks for v, ks in zip(c.V, KS)]
    R = _cast([X[u].times((Z[u] * beta[u]).astype(c.K[0].dtype))[0] for u in states], c)
  return _Recomputed(Q_read, K_read, K_write, P, R, beta, KK, X, Z)


def _load_inverse(c, K_keys, X_ref):
  """Return K K^T and X = (I + A)^-1, for float32 with its residual."""
  decays, states, none = c.decays, range(c.tile.states), [None] * c.tile.states
  A = A_errors = none
  if c.tile.per_channel:
    # Masked here: scores above the diagonal are undefined.
    KK = [decays.strict(u, decays.gates[u].scores(c.K[u], c.K[u]), None) for u in states]
  else:
    KK, errors = decays.key_scores(K_keys)
    if c.K[0].dtype == F32:
      A = [decays.correction_matrix(u, KK[u], c.D[u]) for u in states]
      A_errors = [decays.correction_matrix(u, errors[u], c.D[u]) for u in states]
  X = [Inverse.refine(X_ref[c.tile.state_index(u)], A[u], A_errors[u]) for u in states]
  return KK, X


def _value_gradients(c, f) -> _ValueGradients:
  KdS = scaled([matmul(k, ds) for k, ds in zip(f.K_write, c.dS_cast)], c.row_end)
  dR = [matmul(p, do, TN) + kds for p, do, kds in zip(f.P, c.dO, KdS)]
  if not c.tile.delta_rule:
    return _ValueGradients(dR, None, None, None, [None])
  dY, residual = zip(*[x.times(dr, TN) for x, dr in zip(f.X, _cast(dR, c))])
  dV = [dy * beta for dy, beta in zip(dY, f.beta)]
  return _ValueGradients(dV, _cast(dV, c), dY, _cast(dY, c), residual)


def _query_gradients(c, f, dP, dO_state):
  """Return dQ and the gradient of keys in Q K^T, without gates or with per-head gates."""
  dQK = _cast([c.decays.lower(u, x, D) for u, (x, D) in enumerate(zip(dP, c.D))], c)
  dQ = [matmul(do, s, NT) + matmul(dqk, k) for do, s, dqk, k in zip(dO_state, c.S, dQK, c.K)]
  return dQ, [matmul(dqk, q, TN) for dqk, q in zip(dQK, c.Q)]


def _query_gradients_per_channel(c, f, dP, dO_state):
  """Return dQ and the gradient of keys in Q K^T, with per-channel gates."""
  states, decays, dtype = range(c.tile.states), c.decays, c.K[0].dtype
  dP = [decays.with_transpose(u, dP[u], matmul(f.R[u], c.dO[u], NT)).astype(dtype) for u in states]
  grads = [decays.gates[u].score_gradients(c.Q[u], c.K[u], dP[u]) for u in states]
  dQ, dK_score = zip(*grads)
  dQ_state = scaled([matmul(do, s, NT) for do, s in zip(dO_state, c.S)], c.start)
  return [x + y for x, y in zip(dQ_state, dQ)], dK_score


def _correction_gradients(c, f, d, dKK, dK_score):
  """Return dK of the correction, dK_score with K K^T added, and dV as it multiplies the state."""
  dKK = _cast(dKK, c)
  dV_state = d.V_cast if c.row_start[0] is None else _cast(scaled(d.V, c.row_start), c)
  dK_score = [x + matmul(dkk, k, TN) for x, dkk, k in zip(dK_score, dKK, c.K)]
  dK_correction = [
    matmul(dkk, k) - matmul(dv, s, NT) for dkk, k, dv, s in zip(dKK, c.K, dV_state, c.S)
  ]
  return dK_correction, dK_score, dV_state


def _correction_gradients_per_channel(c, f, d, dKK, dK_score):
  """Return the same as `_correction_gradients`, with per-channel gates."""
  states, decays, dtype = range(c.tile.states), c.decays, c.K[0].dtype
  transposed = [-matmul(f.R[u], d.Y_cast[u], NT) * decays.row[u : u + 1] for u in states]
  dKK = [decays.with_transpose(u, dKK[u], transposed[u]).astype(dtype) for u in states]
  grads = [decays.gates[u].score_gradients(c.K[u], c.K[u], dKK[u]) for u in states]
  dK_correction, dK_right = zip(*grads)
  dK_state = scaled([matmul(dv, s, NT) for dv, s in zip(d.V_cast, c.S)], c.start)
  dK_correction = [x - y for x, y in zip(dK_correction, dK_state)]
  dK_score = [x + y for x, y in zip(dK_score, dK_right)]
  return dK_correction, dK_score, d.V_cast


def _log_decay_gradient(c, u, dQ, dK):
  """Return the gradient of b, and what is added to its last row: by written keys, by the state.

  q_i and the correcting k_i have a factor e^{b_i}, the k_j that they multiply e^{-b_j}, and the
  written k_i has e^{b_C - b_i}: the terms of the last token in b_i and in b_C cancel. They are left
  out, because their rounding error would dominate small gradients.
  """
  q, k, write = c.Q[u].astype(F32), c.K[u].astype(F32), _without_last_row(dK.write[u])
  of_key = write + dK.score[u]
  of_key = dK.correction[u] - of_key if c.tile.delta_rule else -of_key
  return q * dQ[u] + k * of_key, k * write, c.dS[u] * c.S[u].astype(F32)


def _row_gradients(c, dQ, dK, dbeta):
  """Return [rows, C]: dbeta (columns [C, 1]), then gradients of cumulative per-head log decays."""
  tile = c.tile
  if not tile.gate_rows:
    return columns_to_rows(dbeta)
  columns, last = list(dbeta), []
  for u in range(tile.states):
    db, written, state = _log_decay_gradient(c, u, dQ, dK)
    columns.append(jnp.sum(db, axis=1, keepdims=True))
    last.append(_total(written) + _total(state) * c.total[u])
  drows = columns_to_rows(columns)
  last = jnp.concatenate(last, axis=0)
  is_last = lax.broadcasted_iota(jnp.int32, drows.shape, 1) == tile.chunk - 1
  if tile.delta_rule:
    last = jnp.concatenate([jnp.zeros_like(last), last], axis=0)
  return drows + jnp.where(is_last, last, 0.0)


def _store_channel_gate_gradients(dgate_ref, c, dQ, dK):
  """Store the gradients of per-channel log decays g, reverse cumulative sums of those of b."""
  tile, states = c.tile, range(c.tile.states)
  db, written, state = zip(*[_log_decay_gradient(c, u, dQ, dK) for u in states])
  state = columns_to_rows([jnp.sum(x, axis=1, keepdims=True) for x in state])
  is_last = lax.broadcasted_iota(jnp.int32, db[0].shape, 0) == tile.chunk - 1
  for u in states:
    last = jnp.sum(written[u], axis=0, keepdims=True) + state[u : u + 1] * c.total[u]
    dgate_ref[tile.gate_slice(u)] = reverse_cumsum(db[u] + jnp.where(is_last, last, 0.0))


def _row_sums(x, y):
  """Return the row sums of x and y, [C, 1]; of x + y at once if their shapes match."""
  if x.shape == y.shape:
    return jnp.sum(x + y, axis=1, keepdims=True)
  return jnp.sum(x, axis=1, keepdims=True) + jnp.sum(y, axis=1, keepdims=True)


def _without_last_row(x):
  """Return x with zeros in its last row."""
  head, tail = x[:-SUBLANES], x[-SUBLANES:]
  last = lax.broadcasted_iota(jnp.int32, tail.shape, 0) == SUBLANES - 1
  return jnp.concatenate([head, jnp.where(last, 0.0, tail)], axis=0)


def _total(x):
  """Return the sum of x, [1, 1]: over rows first, which needs no cross-lane operations."""
  return jnp.sum(jnp.sum(x, axis=0, keepdims=True), axis=1, keepdims=True)


def backward(q, k, v, rows, gate, states, X, do, dS, *, tile, interpret=False):
  """Return dq, dk, dv, dS0, drows, dgate from the forward's inputs, residuals, and do, dS.

  If J programs share key heads, dq and dk are [B, L, J*key_heads*dk] float32 partial sums. drows is
  [B/sequences, N, J, rows, C]: dbeta (delta rule only), then with per-head gates the gradient of
  the cumulative log decay, one row per state; None if there is neither. dgate is the gradient of
  the per-channel log decays, or None.
  """
  B, L, _ = q.shape
  J, N = v.shape[2] // (tile.heads * tile.dv), L // tile.chunk
  programs = B // tile.sequences
  spec = block_specs(tile, last=N - 1)
  shared = tile.ratio > tile.heads
  dkey = jax.ShapeDtypeStruct((B, L, J * tile.key_heads * tile.dk), F32 if shared else q.dtype)
  args = [q, k, v, do, dS, states]
  in_specs = [spec[x] for x in ("key", "key", "value", "value", "state", "states")]
  if tile.delta_rule:
    args, in_specs = [*args, X], [*in_specs, spec["X"]]
  if tile.row_count:
    args, in_specs = [*args, rows], [*in_specs, spec["rows"]]
  if tile.per_channel:
    args, in_specs = [*args, gate], [*in_specs, spec["gate"]]
  out_specs = [spec["dkey"], spec["dkey"], spec["value"], spec["state"]]
  out_shape = [
    dkey,
    dkey,
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    jax.ShapeDtypeStruct(dS.shape, F32),
  ]
  if drows := (tile.delta_rule + bool(tile.gate_rows)) * tile.states:
    block = (None, None, None, drows, tile.chunk)
    out_specs.append(pl.BlockSpec(block, lambda b, j, n: (b, N - 1 - n, j, 0, 0)))
    out_shape.append(jax.ShapeDtypeStruct((programs, N, J, drows, tile.chunk), F32))
  if tile.per_channel:
    out_specs.append(spec["gate"])
    out_shape.append(jax.ShapeDtypeStruct(gate.shape, F32))
  out = pl.pallas_call(
    functools.partial(_body, tile=tile),
    grid=(programs, J, N),
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=compiler_params(),
    interpret=interpret,
    name=f"{tile.name}_bwd",
  )(*args)
  dq, dk, dv, dS0, *rest = out
  return dq, dk, dv, dS0, rest.pop(0) if drows else None, rest[0] if tile.per_channel else None
