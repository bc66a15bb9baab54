"""What the TPU kernels need of a chunk beside its tokens: masks and decays."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.tiling import SUBLANES, round_up
from pallas_kernels.delta_rule.pallas_tpu.matmul import F32
from pallas_kernels.delta_rule.pallas_tpu.per_channel_gate import FLOOR, Channels, Masks


class Decays:
  """Masks and decays of one chunk, from its rows of beta, cumulative log decays and segments.

  Attributes:
    row, col: the rows [rows, C] and their transpose, if there are any.
    channels: for each state, if its channels decay.
  """

  def __init__(self, tile, rows_ref, gate_ref):
    C = tile.chunk
    self.tile = tile
    if tile.rows:
      self.row = rows_ref[...]
      self.col = self.row.T
    r = lax.broadcasted_iota(jnp.int32, (C, C), 0)
    s = lax.broadcasted_iota(jnp.int32, (C, C), 1)
    self._lower, self._strict, self._upper = [r >= s], [r > s], [r <= s]
    self._kept = [None]  # [C, 1], [C, 1], [1, 1]: tokens that see the carry, reach the next, both
    if tile.packed:
      first = tile.rows - tile.sequences
      segments = [(self.row[i : i + 1], self.col[:, i : i + 1]) for i in range(first, tile.rows)]
      same = [row == col for row, col in segments]
      self._lower = [self._lower[0] & x for x in same]
      self._strict = [self._strict[0] & x for x in same]
      self._upper = [self._upper[0] & x for x in same]
      self._kept = [self._carried(row[:, C - 1 :], col) for row, col in segments]
    if tile.channels:
      masks = Masks(C)
      g = [jnp.maximum(gate_ref[tile.gates_at(u)].astype(F32), FLOOR) for u in range(tile.states)]
      self.channels = [
        Channels(x, masks, self._of_sequence(self._kept, u)) for u, x in enumerate(g)
      ]

  @staticmethod
  def _carried(last, col):
    return tuple(jnp.where(x, 1.0, 0.0) for x in (col == 0.0, col == last, last == 0.0))

  def _of_sequence(self, masks, u):
    return masks[u // self.tile.heads if self.tile.packed else 0]

  def beta(self, u):
    """[C, 1]"""
    return self.col[:, u : u + 1]

  def _gate(self, u):
    """Which rows hold the cumulative log decay: one, or coarse and fine parts."""
    return [self.tile.states * (self.tile.delta_rule + i) + u for i in range(self.tile.gates)]

  def scores(self, u):
    """e^{b_i - b_j} where j <= i in one segment, else 0: [C, C]; None without decay."""
    if not self.tile.gates:
      return None
    # Coarse parts are multiples of 2^-8: their difference is exact however far b has fallen.
    parts = [self.col[:, i : i + 1] - self.row[i : i + 1] for i in self._gate(u)]
    return jnp.exp(jnp.where(self._of_sequence(self._lower, u), sum(parts[1:], parts[0]), -1e30))

  def lower(self, u, x, D):
    """x where j <= i in one segment, decayed by D = scores(u), else 0."""
    return jnp.where(self._of_sequence(self._lower, u), x, 0.0) if D is None else x * D

  def strict(self, u, x, D):
    """x where j < i in one segment, decayed by D = scores(u), else 0."""
    return jnp.where(self._of_sequence(self._strict, u), x if D is None else x * D, 0.0)

  def with_transpose(self, u, x, xT):
    """x where j <= i in one segment, above them its transpose xT, else 0."""
    upper = jnp.where(self._of_sequence(self._upper, u), xT, 0.0)
    return jnp.where(self._of_sequence(self._lower, u), x, upper)

  def erase(self, u, KK, D):
    """A = beta K K^T strictly below the diagonal, with D = scores(u); None of None."""
    return None if KK is None else self.strict(u, KK * self.beta(u), D)

  def carry(self, u):
    """Factors of the carried state in each token, of each token in the next state, of the state.

    Of shapes [C, 1], [C, 1], [1, 1], or [C, dk], [C, dk], [1, dk] where channels decay.
    """
    if self.tile.channels:
      channels = self.channels[u]
      return channels.into, channels.out, channels.whole
    kept = self._of_sequence(self._kept, u)
    if not self.tile.gates:
      return kept
    C = self.tile.chunk
    parts = [self.col[:, i : i + 1] for i in self._gate(u)]
    to_end = [x[C - 1 :] - x for x in parts]
    b, to_end = (sum(x[1:], x[0]) for x in (parts, to_end))
    out = jnp.exp(b), jnp.exp(to_end), jnp.exp(b[C - 1 :])
    return out if kept is None else tuple(x * m for x, m in zip(out, kept))


def as_rows(columns):
  """Columns [C, 1] as rows [n, C], by one transpose."""
  (C, _), n = columns[0].shape, len(columns)
  lane = lax.broadcasted_iota(jnp.int32, (C, round_up(n, SUBLANES)), 1)
  joined = jnp.zeros(lane.shape, F32)
  for i, x in enumerate(columns):
    joined = jnp.where(lane == i, x, joined)
  return joined.T[:n]


def as_columns(rows):
  """Rows [1, C] as columns [C, 1], by one transpose."""
  (_, C), n = rows[0].shape, len(rows)
  padding = jnp.zeros((round_up(n, SUBLANES) - n, C), F32)
  joined = jnp.concatenate([*rows, padding] if n % SUBLANES else rows, axis=0).T
  return [joined[:, i : i + 1] for i in range(n)]
