"""Scores and decays with per-channel gates within a chunk, on GPU.

With b the cumulative log decay of each key channel, a score is sum_c q_ic k_jc e^{b_ic - b_jc}: the
decay cannot be factored out of the dot product, and splitting it into e^{b_i} e^{-b_j} would
overflow. So the chunk is halved recursively, down to single tokens: between the two halves of a
block the decay is split at their boundary m into e^{b_i - b_m} and e^{b_m - b_j}, both <= 1, and
one matmul of the full chunk computes all blocks of one size. Sums of log decays are matmuls with
0/1 matrices: nothing is subtracted, and the lowering has no other way to combine tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import parts_for
from pallas_kernels.delta_rule.checks import FAR_BELOW
from pallas_kernels.delta_rule.pallas_gpu.decay import scale_rows
from pallas_kernels.delta_rule.pallas_gpu.matmul import BF16, F32, NT, dot


class DecayedKeys(NamedTuple):
  """Queries and keys with per-channel decays applied, as they multiply the state."""

  q_start: jax.Array  # q e^{b_i}, reads the state before the chunk [B L Hv dk]
  k_end: jax.Array  # k e^{b_C - b_i}, written to the state after the chunk [B L Hv dk]
  total: jax.Array  # e^{b_C} [N B Hv dk] float32
  k_start: jax.Array | None = None  # k e^{b_i}, delta rule only [B L Hv dk]


def decayed_shapes(k, Hv, chunk, delta_rule) -> dict[str, jax.ShapeDtypeStruct]:
  """Return the shapes of `DecayedKeys` by name, without those that are None."""
  B, L, _, dk = k.shape
  keys = jax.ShapeDtypeStruct((B, L, Hv, dk), k.dtype)
  total = jax.ShapeDtypeStruct((L // chunk, B, Hv, dk), F32)
  return dict(q_start=keys, k_end=keys, total=total) | (dict(k_start=keys) if delta_rule else {})


def decayed_inputs(q, k, g, segments, decayed):
  """Return (q, k, g, segments, total, k_start) for the kernels that carry a state.

  With per-channel gates (`decayed` is not None) q and k include decays and segments, so g and
  segments are None. Otherwise total and k_start are None.
  """
  if decayed is None:
    return q, k, g, segments, None, None
  return decayed.q_start, decayed.k_end, None, None, decayed.total, decayed.k_start


def gate_parts(dtype):
  """Return the bfloat16 parts of a log decay: at least 2, because sums reach hundreds."""
  return max(parts_for(dtype), 2)


class ChannelGate:
  """Decays of a chunk for one block of channels, from its log decays g [C block_k].

  Args:
    mask_id: masks depend on it, through `zero`. The compiler would compute masks with the same id
      once, before both loops or iterations that use them, and hold them in registers, one per
      element (132 bytes spilled in `intra`).
    zero: see `opaque_zero`.
  """

  def __init__(self, g, mask_id, iotas, zero, parts):
    self.g, self.zero, self.parts = jnp.maximum(g.astype(F32), FAR_BELOW), zero, parts
    self.row, self.column = iotas[0] + zero * mask_id, iotas[1]
    self.levels = iotas[0].shape[0].bit_length() - 1

  def masked_sums(self, mask, x):
    """Return [C block_k]: for each row of the mask [C C], the sum of x over its true columns."""
    return dot(jnp.where(mask, 1.0, 0.0).astype(BF16), x, self.parts)

  def start(self):
    """Return e^{b_i} [C block_k]."""
    return jnp.exp(self.masked_sums(self.row >= self.column, self.g))

  def end(self):
    """Return e^{b_C - b_i} [C block_k]."""
    return jnp.exp(self.masked_sums(self.row < self.column, self.g))

  def total(self):
    """Return e^{b_C} [block_k]."""
    return jnp.exp(jnp.sum(self.g, axis=0))

  def to_boundary(self, level):
    """Return the decays between each token and the middle of its block of 2^(level + 1) tokens."""
    row = self.row + self.zero * level
    same_half = (row >> level) == (self.column >> level)
    second = ((row >> level) & 1) == 1
    upto, after = second & (row >= self.column), ~second & (row < self.column)
    return jnp.exp(self.masked_sums(same_half & (upto | after), self.g))

  def pairs(self, level):
    """Return the mask [C C] of scores between the two halves of a block."""
    return (((self.row + self.zero * level) ^ self.column) >> level) == 1


def channel_scores(q_ref, k_ref, g_ref, at, iotas, zero, block_k, with_gram):
  """Return Q K^T and, if with_gram, K K^T with decays for j <= i; undefined for j > i.

  Args:
    at: chunk, sequence, token slice, key head and value head.
  """
  _, b, rows, hk, h = at
  chunk, parts, dtype = rows.size, parts_for(k_ref.dtype), k_ref.dtype
  row, column = iotas

  def over_keys(i, carry):
    cols = pl.ds(i * block_k, block_k)
    Q, K = (ref[b, rows, hk, cols].astype(F32) for ref in (q_ref, k_ref))
    gate = ChannelGate(g_ref[b, rows, h, cols], i + 1, iotas, zero, gate_parts(dtype))

    def over_levels(level, carry):
      decay = gate.to_boundary(level)
      pairs = gate.pairs(level)
      K_decayed = (K * decay).astype(dtype)
      QK = carry[0] + jnp.where(pairs, dot((Q * decay).astype(dtype), K_decayed, parts, NT), 0.0)
      if not with_gram:
        return QK, None
      return QK, carry[1] + jnp.where(pairs, dot(K_decayed, K_decayed, parts, NT), 0.0)

    # The score of a token with itself has no decay.
    diagonal = jnp.where(row == column, jnp.sum(Q * K, axis=1)[:, None], 0.0)
    carry = carry[0] + diagonal, carry[1]
    return lax.fori_loop(0, gate.levels, over_levels, carry)

  square = jnp.zeros((chunk, chunk), F32)
  carry = (square, square if with_gram else None)
  return lax.fori_loop(0, k_ref.shape[-1] // block_k, over_keys, carry)


def store_decayed(
  q_start_ref, k_end_ref, total_ref, k_start_ref, q_ref, k_ref, g_ref, at, iotas, zero, block_k,
  decay
):  # fmt: skip
  """Store the `DecayedKeys` of a chunk; `decay` has the factors of its segments."""
  n, b, rows, hk, h = at

  def over_keys(i, _):
    cols = pl.ds(i * block_k, block_k)
    gate = ChannelGate(g_ref[b, rows, h, cols], i + 2, iotas, zero, gate_parts(k_ref.dtype))
    start = scale_rows(gate.start(), decay.start)
    Q, K = (ref[b, rows, hk, cols].astype(F32) for ref in (q_ref, k_ref))
    q_start_ref[b, rows, h, cols] = (Q * start).astype(q_start_ref.dtype)
    if k_start_ref is not None:
      k_start_ref[b, rows, h, cols] = (K * start).astype(k_start_ref.dtype)
    k_end_ref[b, rows, h, cols] = (K * scale_rows(gate.end(), decay.end)).astype(k_end_ref.dtype)
    total_ref[n, b, h, cols] = gate.total() * (1.0 if decay.total is None else decay.total)

  lax.fori_loop(0, k_ref.shape[-1] // block_k, over_keys, None)
