"""Causal masks, packed segments and decays of one chunk, for the TPU kernels.

Lists have one entry per state of the program; lists of keys have one entry per key head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.tiling import SUBLANES, round_up
from pallas_kernels.delta_rule.pallas_tpu.matmul import F32, NT, gram, matmul
from pallas_kernels.delta_rule.pallas_tpu.per_channel_gate import (
  MIN_LOG_DECAY,
  ChannelGate,
  HalvingMasks,
)


class CarryFactors(NamedTuple):
  """Decays between the tokens of a chunk and the states before and after it.

  Shapes [C, 1], [C, 1], [1, 1], with per-channel gates [C, dk], [C, dk], [1, dk]. None without
  gates and segments. A factor is 0 if a segment boundary lies in between.
  """

  start: jax.Array | None  # e^{b_i}, of the state before the chunk at token i
  end: jax.Array | None  # e^{b_C - b_i}, of token i in the state after the chunk
  total: jax.Array | None  # e^{b_C}, of the state before the chunk in the state after it


class Decays:
  """Masks and decays of one chunk without gates or with one gate per head.

  Attributes:
    row, col: rows [rows, C] of beta, cumulative log decays and segments, and their transpose.
  """

  def __init__(self, tile, rows_ref):
    C = tile.chunk
    self.tile = tile
    if tile.row_count:
      self.row = rows_ref[...]
      self.col = self.row.T
    r = lax.broadcasted_iota(jnp.int32, (C, C), 0)
    s = lax.broadcasted_iota(jnp.int32, (C, C), 1)
    # One mask per sequence if segments are packed, else one for all.
    self._lower, self._strict, self._upper = [r >= s], [r > s], [r <= s]
    self._segment_factors = [None]
    if tile.packed:
      first = tile.row_count - tile.sequences
      segments = [
        (self.row[i : i + 1], self.col[:, i : i + 1]) for i in range(first, tile.row_count)
      ]
      same = [row == col for row, col in segments]
      self._lower = [self._lower[0] & x for x in same]
      self._strict = [self._strict[0] & x for x in same]
      self._upper = [self._upper[0] & x for x in same]
      self._segment_factors = [_segment_factors(row[:, C - 1 :], col) for row, col in segments]

  def _of_sequence(self, masks, u):
    return masks[u // self.tile.heads if self.tile.packed else 0]

  def beta(self, u):
    """Return beta of state u, [C, 1]."""
    return self.col[:, u : u + 1]

  def _gate_rows(self, u):
    """Return the indices of the rows with the cumulative log decay: one, or coarse and fine."""
    return [self.tile.states * (self.tile.delta_rule + i) + u for i in range(self.tile.gate_rows)]

  def score_factors(self, u):
    """Return D = e^{b_i - b_j} where j <= i in one segment, else 0 [C, C]; None without gates."""
    if not self.tile.gate_rows:
      return None
    # Coarse parts are multiples of 2^-8: their differences are exact, however negative b is.
    parts = [self.col[:, i : i + 1] - self.row[i : i + 1] for i in self._gate_rows(u)]
    return jnp.exp(jnp.where(self._of_sequence(self._lower, u), sum(parts[1:], parts[0]), -1e30))

  def lower(self, u, x, D):
    """Return x where j <= i in one segment, times D = score_factors(u), else 0."""
    return jnp.where(self._of_sequence(self._lower, u), x, 0.0) if D is None else x * D

  def strict(self, u, x, D):
    """Return x where j < i in one segment, times D = score_factors(u), else 0."""
    return jnp.where(self._of_sequence(self._strict, u), x if D is None else x * D, 0.0)

  def with_transpose(self, u, x, xT):
    """Return x where j <= i in one segment, its transpose xT above the diagonal, else 0."""
    upper = jnp.where(self._of_sequence(self._upper, u), xT, 0.0)
    return jnp.where(self._of_sequence(self._lower, u), x, upper)

  def correction_matrix(self, u, KK, D):
    """Return A = beta K K^T strictly below the diagonal, times D; None for KK None."""
    return None if KK is None else self.strict(u, KK * self.beta(u), D)

  def carry_factors(self, u) -> CarryFactors:
    segment_factors = self._of_sequence(self._segment_factors, u)
    if not self.tile.gate_rows:
      return segment_factors or CarryFactors(None, None, None)
    C = self.tile.chunk
    parts = [self.col[:, i : i + 1] for i in self._gate_rows(u)]
    to_end = [x[C - 1 :] - x for x in parts]
    b, to_end = (sum(x[1:], x[0]) for x in (parts, to_end))
    out = jnp.exp(b), jnp.exp(to_end), jnp.exp(b[C - 1 :])
    if segment_factors is None:
      return CarryFactors(*out)
    return CarryFactors(*(x * m for x, m in zip(out, segment_factors)))

  def query_scores(self, Q, K):
    """Return Q K^T of every state, before masks and decays."""
    QK = [matmul(q, k, NT) for q, k in zip(Q, K)]
    return [QK[self.tile.key_of(u)] for u in range(self.tile.states)]

  def key_scores(self, K):
    """Return K K^T of every state, before masks and decays, and its rounding errors or Nones."""
    KK, errors = zip(*[gram(k) for k in K])
    keys = [self.tile.key_of(u) for u in range(self.tile.states)]
    return [KK[i] for i in keys], [errors[i] for i in keys]


class ChannelDecays(Decays):
  """Masks and decays of one chunk with per-channel gates, which are part of the scores.

  Attributes:
    gates: a `ChannelGate` per state.
  """

  def __init__(self, tile, rows_ref, gate_ref):
    super().__init__(tile, rows_ref)
    masks = HalvingMasks(tile.chunk)
    log_decays = [
      jnp.maximum(gate_ref[tile.gate_slice(u)].astype(F32), MIN_LOG_DECAY)
      for u in range(tile.states)
    ]
    self.gates = [
      ChannelGate(g, masks, self._of_sequence(self._segment_factors, u))
      for u, g in enumerate(log_decays)
    ]

  def carry_factors(self, u) -> CarryFactors:
    gate = self.gates[u]
    return CarryFactors(gate.start, gate.end, gate.total)

  def query_scores(self, Q, K):
    """Return decayed Q K^T of every state, before masks."""
    keys = [self.tile.key_of(u) for u in range(self.tile.states)]
    return [gate.scores(Q[i], K[i]) for gate, i in zip(self.gates, keys)]

  def key_scores(self, K):
    """Return decayed K K^T of every state, before masks, and Nones."""
    return self.query_scores(K, K), [None] * self.tile.states


def load_decays(tile, rows_ref, gate_ref) -> Decays:
  """Return the masks and decays of this program's chunk."""
  return ChannelDecays(tile, rows_ref, gate_ref) if tile.per_channel else Decays(tile, rows_ref)


def _segment_factors(last, col):
  """Return 0/1 factors: tokens in the carried segment, tokens in the last one, carried is last."""
  return CarryFactors(*(jnp.where(x, 1.0, 0.0) for x in (col == 0.0, col == last, last == 0.0)))


def scaled(x, factors):
  """Multiply lists elementwise; without factors (None) return x itself."""
  return x if factors[0] is None else [a * b for a, b in zip(x, factors)]


def columns_to_rows(columns):
  """Return columns [C, 1] as rows [n, C], by one transpose."""
  (C, _), n = columns[0].shape, len(columns)
  lane = lax.broadcasted_iota(jnp.int32, (C, round_up(n, SUBLANES)), 1)
  joined = jnp.zeros(lane.shape, F32)
  for i, x in enumerate(columns):
    joined = jnp.where(lane == i, x, joined)
  return joined.T[:n]


def rows_to_columns(rows):
  """Return rows [1, C] as columns [C, 1], by one transpose."""
  (_, C), n = rows[0].shape, len(rows)
  padding = jnp.zeros((round_up(n, SUBLANES) - n, C), F32)
  joined = jnp.concatenate([*rows, padding] if n % SUBLANES else rows, axis=0).T
  return [joined[:, i : i + 1] for i in range(n)]
