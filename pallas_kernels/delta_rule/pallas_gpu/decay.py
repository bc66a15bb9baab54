"""What the GPU kernels need of a chunk beside its tokens: masks, decays and their gradients."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.delta_rule.pallas_gpu.matmul import BF16, F32, dot


def opaque_zero(x):
  """An int32 zero the compiler cannot fold, from a loaded scalar (1 for NaN, lost anyway).

  Masks built on it are not loop invariants. Otherwise every mask is hoisted out of the loop over
  chunks and held in registers, one per element (264 bytes spilled instead of 396 when measured).
  """
  return (x != x).astype(jnp.int32)


def grid_iotas(chunk, zero):
  row = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 0) + zero
  column = lax.broadcasted_iota(jnp.int32, (chunk, chunk), 1)
  return row, column


class Decay(NamedTuple):
  """Decays of one chunk; None stands for all ones."""

  # (transposed=False) -> [C C] e^{b_i - b_j} for j <= i in one segment, else 0. A function, so
  # that it is computed where it is used: 32 registers that would otherwise stay live.
  inside: Callable[..., jax.Array]
  start: jax.Array | None  # [C] e^{b_i}, 0 for rows outside the carried segment
  end: jax.Array | None  # [C] e^{b_C - b_i}, 0 for rows outside the last row's segment
  whole: jax.Array | None  # scalar e^{b_C}, 0 if the carried segment ended


def _log_decay(g):
  """Cumulative g as a sum of two parts whose differences do not cancel.

  b reaches -1280 in a chunk, where b_i - b_j in float32 has lost 1e-4. The coarse part consists of
  multiples of 2^-12 and is exact in float32 down to -4096; the fine part stays below 2^-6.
  """
  coarse = jnp.floor(g * 4096.0) * (1 / 4096)
  return jnp.cumsum(coarse), jnp.cumsum(g - coarse), jnp.sum(coarse), jnp.sum(g - coarse)


def load_decay(g_ref, segments_ref, b, h, start, iotas, zero):
  row, column = iotas
  rows = pl.ds(start, row.shape[0])
  carried = last = whole = None
  if segments_ref is not None:
    segments = segments_ref[b, rows]
    carried_document = segments_ref[b, jnp.maximum(start - 1, 0)]
    last_document = segments_ref[b, start + row.shape[0] - 1]
    carried = jnp.where(segments == carried_document, 1.0, 0.0)
    last = jnp.where(segments == last_document, 1.0, 0.0)
    # By arithmetic: the lowering has no select on two scalars. Numbers of segments only go up.
    whole = (1 - jnp.minimum(last_document - carried_document, 1)).astype(F32)
  if g_ref is not None:
    coarse, fine, coarse_sum, fine_sum = _log_decay(g_ref[b, rows, h].astype(F32))
    from_start = jnp.exp(coarse + fine)
    to_end = jnp.exp((coarse_sum - coarse) + (fine_sum - fine))
    carried = from_start if carried is None else from_start * carried
    last = to_end if last is None else to_end * last
    whole = jnp.exp(coarse_sum + fine_sum) * (1.0 if whole is None else whole)

  def inside(transposed=False):
    keep = row <= column if transposed else row >= column
    if segments_ref is not None:
      # Loaded again: their columns, 16 registers, would be live from the first load to here.
      again = segments_ref[b, pl.ds(start + zero, row.shape[0])]
      keep = keep & (again[:, None] == again[None, :])
    if g_ref is None:
      return jnp.where(keep, 1.0, 0.0)
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    between = -between if transposed else between
    return jnp.where(keep, jnp.exp(jnp.where(keep, between, 0.0)), 0.0)

  return Decay(inside, carried, last, whole)


class Chunk(NamedTuple):
  """What every kernel needs of chunk n of value head h."""

  rows: pl.Slice  # its tokens
  beta: jax.Array | None  # [C]
  zero: jax.Array
  iotas: tuple[jax.Array, jax.Array]
  decay: Decay


def load_chunk(k_ref, beta_ref, g_ref, segments_ref, n, b, h, hk, chunk):
  start = n * chunk
  rows = pl.ds(start, chunk)
  beta = None if beta_ref is None else beta_ref[b, rows, h].astype(F32)
  zero = opaque_zero(k_ref[b, start, hk, 0] if beta_ref is None else beta_ref[b, start, h])
  iotas = grid_iotas(chunk, zero)
  return Chunk(rows, beta, zero, iotas, load_decay(g_ref, segments_ref, b, h, start, iotas, zero))


def program_ids(group):
  """The three ids of a program, of which one is value head h, and h's key head."""
  h = pl.program_id(1)
  return pl.program_id(0), h, pl.program_id(2), lax.div(h, lax.full_like(h, group))


def scale_rows(x, factor):
  return x if factor is None or x is None else x.astype(F32) * factor[:, None]


def strict_lower(x, iotas):
  row, column = iotas
  return jnp.where(row > column, x, 0.0)


def score_gates(M, parts, iotas):
  """dg of a chunk from M = score * dscore: M summed over i >= t > j.

  Summed directly, without the cancellation of row minus column sums.
  """
  row, column = iotas
  upper = jnp.where(row <= column, 1.0, 0.0).astype(BF16)
  return jnp.sum(jnp.where(row > column, dot(upper, M, parts), 0.0), axis=1)


def row_gates(start_terms, end_terms, whole_term, iotas):
  """dg of a chunk from the gradient times value of e^{b_i}, of e^{b_C - b_i} and of e^{b_C}."""
  row, column = iotas
  dg = jnp.sum(jnp.where(row <= column, start_terms[None, :], 0.0), axis=1)
  if end_terms is not None:
    dg += jnp.sum(jnp.where(row > column, end_terms[None, :], 0.0), axis=1) + whole_term
  return dg


def pick(refs, *present):
  """The first of refs, None for each that is not present; and the list of those that follow."""
  refs = list(refs)
  return *[refs.pop(0) if x else None for x in present], refs
