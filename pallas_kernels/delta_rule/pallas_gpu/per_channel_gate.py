"""Decays of key channels within a chunk, on GPU.

With b the log decay of each channel summed over tokens, a score is sum_c q_ic k_jc e^{b_ic - b_jc}:
no factor beside the product q k. Divided, e^{b_i} e^{-b_j} would overflow. So the chunk is halved
again and again, down to single tokens: between the halves of a block the decays meet at the
boundary, e^{b_i - b_m} and e^{b_m - b_j}, neither above 1; one product of the whole chunk serves
all blocks of a size. Sums of log decays are products with a matrix of zeros and ones: nothing is
subtracted, and the lowering has no other way from one token to the next.
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


class Decayed(NamedTuple):
  """Queries and keys with their decays, which then stand inside all products with the state."""

  q_into: jax.Array  # q e^{b_i}, as the state before the chunk meets it [B L Hv dk]
  k_out: jax.Array  # k e^{b_C - b_i}, as it is written to the state after the chunk [B L Hv dk]
  whole: jax.Array  # e^{b_C} [N B Hv dk] float32
  k_into: jax.Array | None = None  # k e^{b_i} of the delta rule [B L Hv dk]


def decayed_shapes(k, Hv, chunk, delta_rule):
  """The shapes of `Decayed` as a list, without what is None."""
  B, L, _, dk = k.shape
  keys = jax.ShapeDtypeStruct((B, L, Hv, dk), k.dtype)
  whole = jax.ShapeDtypeStruct((L // chunk, B, Hv, dk), F32)
  return [keys, keys, whole, *([keys] if delta_rule else [])]


def decayed_inputs(q, k, g, segments, decayed):
  """(q, k, g, segments, whole, k_into) of kernels that carry a state; the last two of channels."""
  if decayed is None:
    return q, k, g, segments, None, None
  return decayed.q_into, decayed.k_out, None, None, decayed.whole, decayed.k_into


def gate_parts(dtype):
  """bfloat16 parts of a log decay: it is summed up to hundreds, where one part has no digits."""
  return max(parts_for(dtype), 2)


class Gate:
  """Decays of a chunk's block of channels, from its log decays g [C block_k].

  Masks depend on a number, through zero: those of two loops or rounds with one number would be
  computed once, before both, and stay in registers, one per element (132 bytes spilled in `intra`).
  """

  def __init__(self, g, number, iotas, zero, parts):
    self.g, self.zero, self.parts = jnp.maximum(g.astype(F32), FAR_BELOW), zero, parts
    self.row, self.column = iotas[0] + zero * number, iotas[1]
    self.levels = iotas[0].shape[0].bit_length() - 1

  def sums(self, mask, x):
    """[C block_k]: x of those tokens that each row of the mask has, summed."""
    return dot(jnp.where(mask, 1.0, 0.0).astype(BF16), x, self.parts)

  def into(self):
    """e^{b_i}"""
    return jnp.exp(self.sums(self.row >= self.column, self.g))

  def out(self):
    """e^{b_C - b_i}"""
    return jnp.exp(self.sums(self.row < self.column, self.g))

  def whole(self):
    """e^{b_C} [block_k]"""
    return jnp.exp(jnp.sum(self.g, axis=0))

  def meeting(self, level):
    """Decays of both halves of each block of 2^(level + 1) tokens to where they meet."""
    row = self.row + self.zero * level
    of_half = (row >> level) == (self.column >> level)
    later = ((row >> level) & 1) == 1
    upto, after = later & (row >= self.column), ~later & (row < self.column)
    return jnp.exp(self.sums(of_half & (upto | after), self.g))

  def pairs(self, level):
    """[C C] Scores between a half and the other of its block."""
    return (((self.row + self.zero * level) ^ self.column) >> level) == 1


def channel_scores(q_ref, k_ref, g_ref, at, iotas, zero, block_k, with_gram):
  """Q K^T and, if asked for, K K^T with decays for j <= i; anything for others.

  Args:
    at: number of the chunk, row of the batch, tokens, key head and value head.
  """
  _, b, rows, hk, h = at
  chunk, parts, dtype = rows.size, parts_for(k_ref.dtype), k_ref.dtype
  row, column = iotas

  def over_keys(i, carry):
    cols = pl.ds(i * block_k, block_k)
    Q, K = (ref[b, rows, hk, cols].astype(F32) for ref in (q_ref, k_ref))
    gate = Gate(g_ref[b, rows, h, cols], i + 1, iotas, zero, gate_parts(dtype))

    def over_levels(level, carry):
      meeting = gate.meeting(level)
      pairs = gate.pairs(level)
      K_met = (K * meeting).astype(dtype)
      QK = carry[0] + jnp.where(pairs, dot((Q * meeting).astype(dtype), K_met, parts, NT), 0.0)
      if not with_gram:
        return QK, None
      return QK, carry[1] + jnp.where(pairs, dot(K_met, K_met, parts, NT), 0.0)

    # A token's own score has no decay.
    own = jnp.where(row == column, jnp.sum(Q * K, axis=1)[:, None], 0.0)
    carry = carry[0] + own, carry[1]
    return lax.fori_loop(0, gate.levels, over_levels, carry)

  square = jnp.zeros((chunk, chunk), F32)
  carry = (square, square if with_gram else None)
  return lax.fori_loop(0, k_ref.shape[-1] // block_k, over_keys, carry)


def store_decayed(refs, q_ref, k_ref, g_ref, at, iotas, zero, block_k, decay):
  """Writes `Decayed` of a chunk; decay has the masks of its segments."""
  q_into_ref, k_out_ref, whole_ref, *k_into_refs = refs
  n, b, rows, hk, h = at

  def over_keys(i, _):
    cols = pl.ds(i * block_k, block_k)
    gate = Gate(g_ref[b, rows, h, cols], i + 2, iotas, zero, gate_parts(k_ref.dtype))
    into = scale_rows(gate.into(), decay.start)
    Q, K = (ref[b, rows, hk, cols].astype(F32) for ref in (q_ref, k_ref))
    q_into_ref[b, rows, h, cols] = (Q * into).astype(q_into_ref.dtype)
    for ref in k_into_refs:
      ref[b, rows, h, cols] = (K * into).astype(ref.dtype)
    k_out_ref[b, rows, h, cols] = (K * scale_rows(gate.out(), decay.end)).astype(k_out_ref.dtype)
    whole_ref[n, b, h, cols] = gate.whole() * (1.0 if decay.whole is None else decay.whole)

  lax.fori_loop(0, k_ref.shape[-1] // block_k, over_keys, None)
