"""Scores with per-channel gates within a chunk, on TPU.

With b the cumulative log decay of each key channel, a score is sum_c q_ic k_jc e^{b_ic - b_jc}: the
decay cannot be factored out of the dot product, and splitting it into e^{b_i} e^{-b_j} would
overflow. So the chunk is halved recursively: between the two halves of a block the decay is split
at their boundary m into e^{b_i - b_m} and e^{b_m - b_j}, both <= 1, and one matmul of the full
chunk computes all blocks of one size. The remaining diagonal blocks of 8 tokens split the decay at
their middle, which stays within e^80 for log decays >= -20, the lower bound enforced here.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.tiling import SUBLANES
from pallas_kernels.delta_rule.pallas_tpu.matmul import F32, NT, matmul

MIN_LOG_DECAY = -20.0  # smaller log decays are clamped: e^-20 is 2e-9


def _rows(C, width):
  return lax.broadcasted_iota(jnp.int32, (C, width), 0)


def _roll(x, n):
  """Rotate rows down by n."""
  # np.int32: a Python int would be 64-bit with jax_enable_x64.
  return pltpu.roll(x, np.int32(n % x.shape[0]), 0)


def _within_blocks_of_8(g):
  """Return sums of g over the tokens of a block of 8 up to each token, and after it."""
  row = _rows(*g.shape) & 7
  upto, after = g, jnp.where(row < 7, _roll(g, -1), 0.0)
  for n in (1, 2, 4):
    upto = upto + jnp.where(row >= n, _roll(upto, n), 0.0)
    after = after + jnp.where(row < 8 - n, _roll(after, -n), 0.0)
  return upto, after


def _join_blocks(upto, after, n):
  """Return the sums of `_within_blocks_of_8` for blocks of 2n tokens from those for n."""
  C, d = upto.shape
  total = [jnp.broadcast_to(upto[i + n - 1 : i + n], (n, d)) for i in range(0, C, n)]
  block = lambda x, i: x[i * n : (i + 1) * n]
  upto = [block(upto, i) + total[i - 1] if i % 2 else block(upto, i) for i in range(C // n)]
  after = [block(after, i) if i % 2 else block(after, i) + total[i + 1] for i in range(C // n)]
  return jnp.concatenate(upto, axis=0), jnp.concatenate(after, axis=0)


def reverse_cumsum(x):
  """Return reverse cumulative sums over rows: each row plus all rows after it."""
  upto, after = _within_blocks_of_8(x)
  n = SUBLANES
  while n < x.shape[0]:
    upto, after = _join_blocks(upto, after, n)
    n *= 2
  return x + after


class HalvingMasks:
  """Which scores of a chunk are computed at which block size; shared by all states."""

  def __init__(self, C):
    r, s = _rows(C, C), lax.broadcasted_iota(jnp.int32, (C, C), 1)
    self.same_8 = (r & -8) == (s & -8)
    self.sizes = [n for n in (8, 16, 32, 64, 128) if n < C]
    self.pairs = {n: (((r ^ s) & -2 * n) == 0) & (((r ^ s) & n) != 0) for n in self.sizes}


class ChannelGate:
  """Per-channel decays of one state's chunk, from its log decays g [C, dk].

  Args:
    segment_factors: 0/1 factors of start, end and total for packed segments, or None.

  Attributes:
    start: e^{b_i} [C, dk], decay of the state before the chunk until token i.
    end: e^{b_C - b_i} [C, dk], decay of token i until the state after the chunk.
    total: e^{b_C} [1, dk].
  """

  def __init__(self, g, masks, segment_factors):
    C, d = g.shape
    self.masks = masks
    upto, after = _within_blocks_of_8(g)
    middle = upto.reshape(C // 8, 8, d)[:, 3:4]
    x = upto - jnp.broadcast_to(middle, (C // 8, 8, d)).reshape(C, d)
    self._query_decay, self._key_decay = jnp.exp(x), jnp.exp(-x)
    self._second_half, self._to_boundary = {}, {}
    for n in masks.sizes:
      self._second_half[n] = (_rows(C, d) & n) != 0
      self._to_boundary[n] = jnp.exp(jnp.where(self._second_half[n], upto, after))
      upto, after = _join_blocks(upto, after, n)
    self.start, self.end, self.total = jnp.exp(upto), jnp.exp(after), jnp.exp(upto[C - 1 :])
    if segment_factors is not None:
      self.start, self.end, self.total = (
        x * m for x, m in zip((self.start, self.end, self.total), segment_factors)
      )

  def _decayed_to_boundary(self, n, F, K):
    """Return second halves of F and first halves of K, decayed to the boundary, as one matrix."""
    return jnp.where(self._second_half[n], F, K) * self._to_boundary[n]

  def scores(self, F, K):
    """Return sum_c F_ic K_jc e^{b_ic - b_jc} for j <= i; undefined for j > i."""
    dtype = F.dtype
    F, K = F.astype(F32), K.astype(F32)
    P = matmul((F * self._query_decay).astype(dtype), (K * self._key_decay).astype(dtype), NT)
    for n, pairs in self.masks.pairs.items():
      halves = self._decayed_to_boundary(n, F, K).astype(dtype)
      P = jnp.where(pairs, matmul(halves, halves, NT), P)
    return P

  def score_gradients(self, F, K, dP):
    """Return dF and dK from dP [C, C] in the keys' dtype, its transpose above the diagonal."""
    C, dtype = F.shape[0], F.dtype
    F, K = F.astype(F32), K.astype(F32)
    zero = jnp.zeros_like(dP)
    r, s = _rows(C, C), lax.broadcasted_iota(jnp.int32, (C, C), 1)
    lower, upper = self.masks.same_8 & (r >= s), self.masks.same_8 & (r <= s)
    dF = matmul(jnp.where(lower, dP, zero), (K * self._key_decay).astype(dtype)) * self._query_decay
    dK = matmul(jnp.where(upper, dP, zero), (F * self._query_decay).astype(dtype)) * self._key_decay
    for n, pairs in self.masks.pairs.items():
      halves = self._decayed_to_boundary(n, F, K).astype(dtype)
      both = matmul(jnp.where(pairs, dP, zero), halves) * self._to_boundary[n]
      dF = dF + jnp.where(self._second_half[n], both, 0.0)
      dK = dK + jnp.where(self._second_half[n], 0.0, both)
    return dF, dK
