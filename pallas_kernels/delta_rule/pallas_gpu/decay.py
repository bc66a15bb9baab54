"""Causal masks, packed segments and per-head decays of one chunk, for the GPU kernels."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.delta_rule.pallas_gpu.matmul import BF16, F32, dot


def opaque_zero(x):
  """Return an int32 zero that the compiler cannot fold, from a loaded scalar (1 if it is NaN).

  Masks built on it are not loop invariants. Otherwise the compiler hoists every mask out of the
  loop over chunks and holds it in registers, one per element (measured: 396 bytes spilled, 264 with
  this).
  """
  return (x != x).astype(jnp.int32)


def mask_iotas(chunk, zero):
  """Return row and column indices [C C]; masks compare them."""
  row = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0) + zero
  column = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)
  return row, column


class Decay(NamedTuple):
  """Decays of one chunk; None stands for all ones."""

  # (transposed=False) -> [C C] e^{b_i - b_j} for j <= i in one segment, else 0. A function, so
  # that it is computed where it is used: its 32 registers would otherwise stay live.
  score_factors: Callable[..., jax.Array]
  start: jax.Array | None  # [C] e^{b_i}, 0 for tokens outside the carried segment
  end: jax.Array | None  # [C] e^{b_C - b_i}, 0 for tokens outside the last token's segment
  total: jax.Array | None  # scalar e^{b_C}, 0 if the carried segment ended


def _log_decay(g):
  """Return the cumulative sum of g as two parts whose differences do not cancel, and their totals.

  b reaches -1280 in a chunk, where b_i - b_j in float32 has an error of 1e-4. The coarse part
  consists of multiples of 2^-12 and is exact in float32 down to -4096; the fine part stays below
  2^-6.
  """
  coarse = jnp.floor(g * 4096.0) * (1 / 4096)
  return jnp.cumsum(coarse), jnp.cumsum(g - coarse), jnp.sum(coarse), jnp.sum(g - coarse)


def _load_decay(g_ref, segments_ref, b, h, start, iotas, zero):
  row, column = iotas
  rows = pl.ds(start, row.shape[0])
  carried = last = total = None
  if segments_ref is not None:
    segments = segments_ref[b, rows]
    carried_segment = segments_ref[b, jnp.maximum(start - 1, 0)]
    last_segment = segments_ref[b, start + row.shape[0] - 1]
    carried = jnp.where(segments == carried_segment, 1.0, 0.0)
    last = jnp.where(segments == last_segment, 1.0, 0.0)
    # Arithmetic, because the lowering has no select on scalars. Segment numbers never decrease.
    total = (1 - jnp.minimum(last_segment - carried_segment, 1)).astype(F32)
  if g_ref is not None:
    coarse, fine, coarse_sum, fine_sum = _log_decay(g_ref[b, rows, h].astype(F32))
    from_start = jnp.exp(coarse + fine)
    to_end = jnp.exp((coarse_sum - coarse) + (fine_sum - fine))
    carried = from_start if carried is None else from_start * carried
    last = to_end if last is None else to_end * last
    total = jnp.exp(coarse_sum + fine_sum) * (1.0 if total is None else total)

  def score_factors(transposed=False):
    keep = row <= column if transposed else row >= column
    if segments_ref is not None:
      # Loaded again: from the first load to here it would occupy 16 registers.
      again = segments_ref[b, pl.ds(start + zero, row.shape[0])]
      keep = keep & (again[:, None] == again[None, :])
    if g_ref is None:
      return jnp.where(keep, 1.0, 0.0)
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    between = -between if transposed else between
    return jnp.where(keep, jnp.exp(jnp.where(keep, between, 0.0)), 0.0)

  return Decay(score_factors, carried, last, total)


class Chunk(NamedTuple):
  """Token slice, beta, masks and decays of chunk n of value head h."""

  rows: pl.Slice  # its tokens
  beta: jax.Array | None  # [C]
  zero: jax.Array  # see `opaque_zero`
  iotas: tuple[jax.Array, jax.Array]
  decay: Decay


def load_chunk(k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk) -> Chunk:
  start = n * chunk
  rows = pl.ds(start, chunk)
  beta = None if beta_ref is None else beta_ref[b, rows, h].astype(F32)
  zero = opaque_zero(k_ref[b, start, hk, 0] if beta_ref is None else beta_ref[b, start, h])
  iotas = mask_iotas(chunk, zero)
  return Chunk(rows, beta, zero, iotas, _load_decay(g_ref, segments_ref, b, h, start, iotas, zero))


def program_ids(group):
  """Return the program ids (chunk or value block, value head, sequence) and the key head.

  Args:
    group: value heads per key head.
  """
  h = pl.program_id(1)
  return pl.program_id(0), h, pl.program_id(2), lax.div(h, lax.full_like(h, group))


def scale_rows(x, factor):
  """Return x [C d] times factor [C] in float32; x itself if either is None."""
  return x if factor is None or x is None else x.astype(F32) * factor[:, None]


def strict_lower(x, iotas):
  """Return x [C C] with zeros on and above the diagonal."""
  row, column = iotas
  return jnp.where(row > column, x, 0.0)


def gate_gradient_from_scores(M, parts, iotas):
  """Return dg [C] of a chunk from M = score * dscore: the sum of M_ij over i >= t > j.

  Summed directly, without the cancellation of row sums minus column sums.
  """
  row, column = iotas
  upper = jnp.where(row <= column, 1.0, 0.0).astype(BF16)
  return jnp.sum(jnp.where(row > column, dot(upper, M, parts), 0.0), axis=1)


def gate_gradient_from_rows(start_terms, end_terms, total_term, iotas):
  """Return dg [C] of a chunk from gradient times value of e^{b_i}, e^{b_C - b_i} and e^{b_C}.

  end_terms may be None; total_term is then ignored.
  """
  row, column = iotas
  dg = jnp.sum(jnp.where(row <= column, start_terms[None, :], 0.0), axis=1)
  if end_terms is not None:
    dg += jnp.sum(jnp.where(row > column, end_terms[None, :], 0.0), axis=1) + total_term
  return dg
