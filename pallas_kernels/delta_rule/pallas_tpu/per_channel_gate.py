"""Decays of key channels within a chunk, on TPU.

With b the log decay of each channel summed over tokens, a score is sum_c q_ic k_jc e^{b_ic - b_jc}:
no factor beside the product q k. Divided, e^{b_i} e^{-b_j} would overflow. So the chunk is halved
again and again: between the halves of a block the decays meet at the boundary, e^{b_i - b_m} and
e^{b_m - b_j}, neither above 1; one product of the whole chunk serves all blocks of a size. What is
left are blocks of 8 tokens, whose decays are taken from their middle: within e^80 for log decays
above -20, the floor.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.tiling import SUBLANES
from pallas_kernels.delta_rule.pallas_tpu.matmul import F32, NT, matmul

FLOOR = -20.0  # log decays below are taken as it: e^-20 is 2e-9


def _rows(C, width):
  return lax.broadcasted_iota(jnp.int32, (C, width), 0)


def _roll(x, n):
  """Rows moved down by n, the last ones to the top."""
  # A plain n would be a 64-bit number where jax_enable_x64 is set.
  return pltpu.roll(x, np.int32(n % x.shape[0]), 0)


def _within_blocks_of_8(g):
  """Sums of g over the tokens of a block up to each, and over those after it."""
  row = _rows(*g.shape) & 7
  upto, after = g, jnp.where(row < 7, _roll(g, -1), 0.0)
  for n in (1, 2, 4):
    upto = upto + jnp.where(row >= n, _roll(upto, n), 0.0)
    after = after + jnp.where(row < 8 - n, _roll(after, -n), 0.0)
  return upto, after


def _join_blocks(upto, after, n):
  """The same of blocks of 2n tokens, from those of n."""
  C, d = upto.shape
  total = [jnp.broadcast_to(upto[i + n - 1 : i + n], (n, d)) for i in range(0, C, n)]
  block = lambda x, i: x[i * n : (i + 1) * n]
  upto = [block(upto, i) + total[i - 1] if i % 2 else block(upto, i) for i in range(C // n)]
  after = [block(after, i) if i % 2 else block(after, i) + total[i + 1] for i in range(C // n)]
  return jnp.concatenate(upto, axis=0), jnp.concatenate(after, axis=0)


def sums_from(x):
  """Of each row and all after it."""
  upto, after = _within_blocks_of_8(x)
  n = SUBLANES
  while n < x.shape[0]:
    upto, after = _join_blocks(upto, after, n)
    n *= 2
  return x + after


class Masks:
  """Which scores of a chunk are computed at which size of blocks; the same for all states."""

  def __init__(self, C):
    r, s = _rows(C, C), lax.broadcasted_iota(jnp.int32, (C, C), 1)
    self.same_8 = (r & -8) == (s & -8)
    self.sizes = [n for n in (8, 16, 32, 64, 128) if n < C]
    self.pairs = {n: (((r ^ s) & -2 * n) == 0) & (((r ^ s) & n) != 0) for n in self.sizes}


class Channels:
  """Decays of one state's chunk, from its g [C, dk]; kept: masks of the carried segment.

  Attributes:
    into: e^{b_i}, of the carried state in each token.
    out: e^{b_C - b_i}, of each token in the next state.
    whole: e^{b_C} [1, dk].
  """

  def __init__(self, g, masks, kept):
    C, d = g.shape
    self.masks = masks
    upto, after = _within_blocks_of_8(g)
    middle = upto.reshape(C // 8, 8, d)[:, 3:4]
    x = upto - jnp.broadcast_to(middle, (C // 8, 8, d)).reshape(C, d)
    self._of_query, self._of_key = jnp.exp(x), jnp.exp(-x)
    self._odd, self._meeting = {}, {}
    for n in masks.sizes:
      self._odd[n] = (_rows(C, d) & n) != 0
      self._meeting[n] = jnp.exp(jnp.where(self._odd[n], upto, after))
      upto, after = _join_blocks(upto, after, n)
    self.into, self.out, self.whole = jnp.exp(upto), jnp.exp(after), jnp.exp(upto[C - 1 :])
    if kept is not None:
      self.into, self.out, self.whole = (
        x * m for x, m in zip((self.into, self.out, self.whole), kept)
      )

  def _met(self, n, F, K):
    """Later halves of F and earlier ones of K, decayed to where they meet, in one matrix."""
    return jnp.where(self._odd[n], F, K) * self._meeting[n]

  def scores(self, F, K):
    """sum_c F_ic K_jc e^{b_ic - b_jc} for j <= i; anything for others."""
    dtype = F.dtype
    F, K = F.astype(F32), K.astype(F32)
    P = matmul((F * self._of_query).astype(dtype), (K * self._of_key).astype(dtype), NT)
    for n, pairs in self.masks.pairs.items():
      met = self._met(n, F, K).astype(dtype)
      P = jnp.where(pairs, matmul(met, met, NT), P)
    return P

  def score_gradients(self, F, K, dP):
    """dF and dK from dP [C, C] with its transpose above the diagonal, in the keys' dtype."""
    C, dtype = F.shape[0], F.dtype
    F, K = F.astype(F32), K.astype(F32)
    zero = jnp.zeros_like(dP)
    r, s = _rows(C, C), lax.broadcasted_iota(jnp.int32, (C, C), 1)
    lower, upper = self.masks.same_8 & (r >= s), self.masks.same_8 & (r <= s)
    dF = matmul(jnp.where(lower, dP, zero), (K * self._of_key).astype(dtype)) * self._of_query
    dK = matmul(jnp.where(upper, dP, zero), (F * self._of_query).astype(dtype)) * self._of_key
    for n, pairs in self.masks.pairs.items():
      met = self._met(n, F, K).astype(dtype)
      both = matmul(jnp.where(pairs, dP, zero), met) * self._meeting[n]
      dF = dF + jnp.where(self._odd[n], both, 0.0)
      dK = dK + jnp.where(self._odd[n], 0.0, both)
    return dF, dK
