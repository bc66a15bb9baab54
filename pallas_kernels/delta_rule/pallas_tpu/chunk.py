"""What the TPU kernels need of a chunk beside its tokens: masks and decays."""

import jax.numpy as jnp
from jax import lax


class Decays:
  """Masks and decays of one chunk, from its rows of beta, cumulative log decays and documents.

  Attributes:
    row, col: the rows [rows, C] and their transpose.
    lower, strict: j <= i and j < i, within one document.
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
    if tile.packed:
      row, col = self.row[tile.rows - 1 :], self.col[:, tile.rows - 1 :]
      same = row == col
      self.lower, self.strict = self.lower & same, self.strict & same
      last = row[:, C - 1 :]
      self.kept = tuple(jnp.where(x, 1.0, 0.0) for x in (col == 0.0, col == last, last == 0.0))

  def beta(self, h):
    """[C, 1]"""
    return self.col[:, h : h + 1]

  def scores(self, h):
    """e^{b_i - b_j} where j <= i in one document, else 0: [C, C]; None without decay."""
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
