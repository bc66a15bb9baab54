"""Delta rule on TPU, forward: one kernel reads q, k, v, beta, g and writes o and the last state.

Grid (batch, head group, chunk); the state of a group stays in VMEM over its chunks. The heads of a
group are worked on stage by stage, so that one head's products hide the latency of another's.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.delta_rule.mosaic_tpu_inverse import (
  F32,
  NT,
  TN,
  Inverse,
  gram,
  matmul,
  unit_lower_inverse,
)
from pallas_kernels.tiling import TPU_VMEM_LIMIT


@dataclasses.dataclass(frozen=True)
class Tile:
  """Static description of one program: C tokens of `heads` value heads and their key heads."""

  chunk: int
  heads: int  # value heads per program
  key_heads: int  # key heads per program
  ratio: int  # value heads per key head
  dk: int
  dv: int
  gated: bool
  segmented: bool
  scale: float
  inverse_precision: str
  base: int = 16  # size of the diagonal blocks inverted by substitution

  @property
  def rows(self) -> int:
    return self.heads * (1 + 2 * self.gated) + self.segmented

  def key_head(self, h: int) -> int:
    return h // self.ratio if self.key_heads > 1 else 0


class Decays:
  """Masks and decays of one chunk, from its rows of beta, cumulative log decays and segments.

  Attributes:
    row, col: the rows [rows, C] and their transpose.
    lower, strict: j <= i and j < i, within one segment.
  """

  def __init__(self, tile, rows_ref):
    C = tile.chunk
    self.tile = tile
    self.row = rows_ref[...]
    self.col = self.row.T
    r = lax.broadcasted_iota(jnp.int32, (C, C), 0)
    s = lax.broadcasted_iota(jnp.int32, (C, C), 1)
    self.lower, self.strict = r >= s, r > s
    self.kept = None  # [C, 1], [C, 1], [1, 1]: tokens that see the carry, that reach the next, both
    if tile.segmented:
      row, col = self.row[tile.rows - 1 :], self.col[:, tile.rows - 1 :]
      same = row == col
      self.lower, self.strict = self.lower & same, self.strict & same
      last = row[:, C - 1 :]
      self.kept = tuple(jnp.where(x, 1.0, 0.0) for x in (col == 0.0, col == last, last == 0.0))

  def beta(self, h):
    """[C, 1]"""
    return self.col[:, h : h + 1]

  def scores(self, h):
    """e^{b_i - b_j} where j <= i in one segment, else 0: [C, C]; None without decay."""
    if not self.tile.gated:
      return None
    i, j = self.tile.heads + h, 2 * self.tile.heads + h
    # The coarse parts are multiples of 2^-8: their difference is exact however far b has fallen.
    coarse = self.col[:, i : i + 1] - self.row[i : i + 1]
    fine = self.col[:, j : j + 1] - self.row[j : j + 1]
    return jnp.exp(jnp.where(self.lower, coarse + fine, -1e30))

  def erase(self, h, KK, D):
    """A = beta K K^T strictly below the diagonal, with D = scores(h); None of None."""
    return None if KK is None else masked(self.strict, KK * self.beta(h), D)

  def carry(self, h):
    """Factors of the carried state in each token, of each token in the next state, of the state."""
    if not self.tile.gated:
      return self.kept
    i, j = self.tile.heads + h, 2 * self.tile.heads + h
    coarse, fine = self.col[:, i : i + 1], self.col[:, j : j + 1]
    C = self.tile.chunk
    to_end = (coarse[C - 1 :] - coarse) + (fine[C - 1 :] - fine)
    b = coarse + fine
    out = jnp.exp(b), jnp.exp(to_end), jnp.exp(b[C - 1 :])
    return out if self.kept is None else tuple(x * m for x, m in zip(out, self.kept))


def masked(mask, x, decay=None):
  """x within the mask, times the decay (which is 0 outside the lower triangle) if there is one."""
  return jnp.where(mask, x if decay is None else x * decay, 0.0)


def _fwd_body(*refs, tile, with_S0, save):
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
  carried = tile.gated or tile.segmented
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


def block_specs(tile, last=None):
  """Specs of keys, values, rows, states and per-chunk matrices; `last` chunk first if it is set."""
  C, G, dk, dv = tile.chunk, tile.heads, tile.dk, tile.dv
  share = max(tile.ratio // G, 1)  # programs that read one key head
  at = (lambda n: n) if last is None else (lambda n: last - n)
  # A plain `share` would be a 64-bit number where jax_enable_x64 is set.
  key = lambda j: lax.div(j, lax.full_like(j, share))
  return dict(
    key=pl.BlockSpec((None, C, tile.key_heads * dk), lambda b, j, n: (b, at(n), key(j))),
    dkey=pl.BlockSpec((None, C, tile.key_heads * dk), lambda b, j, n: (b, at(n), j)),
    value=pl.BlockSpec((None, C, G * dv), lambda b, j, n: (b, at(n), j)),
    rows=pl.BlockSpec((None, None, None, tile.rows, C), lambda b, j, n: (b, at(n), j, 0, 0)),
    state=pl.BlockSpec((None, G, dk, dv), lambda b, j, n: (b, j, 0, 0)),
    X=pl.BlockSpec((None, None, G, C, C), lambda b, j, n: (b, at(n), j, 0, 0)),
    states=pl.BlockSpec((None, None, G, dk, dv), lambda b, j, n: (b, at(n), j, 0, 0)),
  )


def compiler_params():
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=TPU_VMEM_LIMIT
  )


def forward(q, k, v, rows, S0, *, tile, save=False, interpret=False):
  """o, S (and X, the states before each chunk) from q, k [B, L, H*dk], v [B, L, Hv*dv] and rows.

  Args:
    rows: [B, N, Hv/heads, rows, C] float32: beta, coarse and fine cumulative log decay of each head
      of a group, number of the segment within the chunk (0: the carried one).
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
    functools.partial(_fwd_body, tile=tile, with_S0=S0 is not None, save=save),
    grid=(B, J, N),
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=compiler_params(),
    interpret=interpret,
    name="delta_rule_fwd",
  )(*args)
