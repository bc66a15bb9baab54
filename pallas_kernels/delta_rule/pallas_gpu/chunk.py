"""What the GPU kernels (Pallas, Triton lowering) share: split dots, the stable inverse, decays."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.precision import bf16_parts

F32 = jnp.float32
BF16 = jnp.bfloat16

NN = (((1,), (0,)), ((), ()))  # a b
NT = (((1,), (1,)), ((), ()))  # a b^T
TN = (((0,), (0,)), ((), ()))  # a^T b

INVERSE_PASSES = {"bf16": 1, "bf16x3": 3, "bf16x6": 6, "substitution": 6}
# Products of the float32 path: three bf16 parts per operand, six products. Three products (two
# parts) keep about 16 bits; one TF32 pass would be silent in interpret mode.
FLOAT32_PASSES = 6


def passes_for(dtype):
  return FLOAT32_PASSES if dtype == F32 else 1


def _parts(x, count, rest=None):
  return [x] if x.dtype == BF16 else bf16_parts(x, count, rest)


def dot(a, b, passes, dims=NN, rest=None):
  """a b in float32 out of 1, 3 or 6 bf16 products; a bfloat16 operand is exact as it is.

  Split by hand so that the rounding is the same in interpret mode as on the GPU. `rest` has digits
  of b below its last.
  """
  count = {1: 1, 3: 2, 6: 3}[passes]
  a_parts, b_parts = _parts(a, count), _parts(b, count, rest)
  pairs = [(i, j) for i in range(len(a_parts)) for j in range(len(b_parts)) if i + j < count]
  out = None
  for i, j in sorted(pairs, key=sum, reverse=True):  # smallest terms first
    term = lax.dot_general(a_parts[i], b_parts[j], dims, preferred_element_type=F32)
    out = term if out is None else out + term
  return out


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


def unit_lower_inverse(A, precision, iotas, zero):
  """X = (I + A)^-1 for strictly lower A, by 2x2 block merges or by forward substitution."""
  chunk = A.shape[0]
  row, column = iotas
  eye = jnp.where(row == column, 1.0, 0.0)
  if precision == "substitution":

    def step(i, X):
      a = jnp.sum(jnp.where(row == i, A, 0.0), axis=0)
      new = eye - jnp.sum(a[:, None] * X, axis=0)[None, :]
      return jnp.where(row == i, new, X)

    return lax.fori_loop(1, chunk, step, eye)
  passes = INVERSE_PASSES[precision]

  def merge(level, X):
    # Row in the odd, column in the even half of one block of 2^(level+1); A is zero above.
    A_level = jnp.where((((row + zero * level) ^ column) >> level) == 1, A, 0.0)
    return X - dot(dot(X, A_level, passes), X, passes)

  # A loop, not unrolled: the descriptors of every product would be hoisted and spill.
  first = eye - jnp.where((row ^ column) == 1, A, 0.0)
  return lax.fori_loop(1, chunk.bit_length() - 1, merge, first)


def residual(A, X, iotas):
  """I - (I + A) X, largest terms first: products of single parts cancel almost without rounding."""
  row, column = iotas
  E = jnp.where(row == column, 1.0, 0.0) - X
  A, X = _parts(A, 3), _parts(X, 3)
  for i, j in sorted(itertools.product(range(3), repeat=2), key=sum)[:-1]:
    E -= dot(A[i], X[j], 1)
  return E


class Decay(NamedTuple):
  """Decays of one chunk; None stands for all ones."""

  # () -> [C C] e^{b_i - b_j} for j <= i in one segment, else 0. A function, so that it is computed
  # where it is used: 32 registers that would otherwise stay live.
  inside: Callable[[], jax.Array]
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


def load_decay(g_ref, seg_ref, b, h, start, iotas, zero):
  row, column = iotas
  rows = pl.ds(start, row.shape[0])
  carried = last = whole = None
  if seg_ref is not None:
    seg = seg_ref[b, rows]
    seg_carried = seg_ref[b, jnp.maximum(start - 1, 0)]
    seg_last = seg_ref[b, start + row.shape[0] - 1]
    carried = jnp.where(seg == seg_carried, 1.0, 0.0)
    last = jnp.where(seg == seg_last, 1.0, 0.0)
    # By arithmetic: the lowering has no select on two scalars. seg only ever counts up.
    whole = (1 - jnp.minimum(seg_last - seg_carried, 1)).astype(F32)
  if g_ref is not None:
    coarse, fine, coarse_sum, fine_sum = _log_decay(g_ref[b, rows, h].astype(F32))
    from_start = jnp.exp(coarse + fine)
    to_end = jnp.exp((coarse_sum - coarse) + (fine_sum - fine))
    carried = from_start if carried is None else from_start * carried
    last = to_end if last is None else to_end * last
    whole = jnp.exp(coarse_sum + fine_sum) * (1.0 if whole is None else whole)

  def inside():
    keep = row >= column
    if seg_ref is not None:
      # Loaded again: the columns of seg, 16 registers, would be live from the first load to here.
      again = seg_ref[b, pl.ds(start + zero, row.shape[0])]
      keep = keep & (again[:, None] == again[None, :])
    if g_ref is None:
      return jnp.where(keep, 1.0, 0.0)
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return jnp.where(keep, jnp.exp(jnp.where(keep, between, 0.0)), 0.0)

  return Decay(inside, carried, last, whole)


class Chunk(NamedTuple):
  """What every kernel needs of chunk n of value head h."""

  rows: pl.Slice  # its tokens
  beta: jax.Array  # [C]
  zero: jax.Array
  iotas: tuple[jax.Array, jax.Array]
  decay: Decay


def load_chunk(beta_ref, g_ref, seg_ref, n, b, h, chunk):
  start = n * chunk
  rows = pl.ds(start, chunk)
  beta = beta_ref[b, rows, h].astype(F32)
  zero = opaque_zero(beta_ref[b, start, h])
  iotas = grid_iotas(chunk, zero)
  return Chunk(rows, beta, zero, iotas, load_decay(g_ref, seg_ref, b, h, start, iotas, zero))


def program_ids(group):
  """The three ids of a program, of which one is value head h, and h's key head."""
  h = pl.program_id(1)
  return pl.program_id(0), h, pl.program_id(2), lax.div(h, lax.full_like(h, group))


def scale_rows(x, factor):
  return x if factor is None or x is None else x * factor[:, None]


def strict_lower(x, iotas):
  row, column = iotas
  return jnp.where(row > column, x, 0.0)


def score_gates(M, passes, iotas):
  """dg of a chunk from M = score * dscore: M summed over i >= t > j.

  Summed directly, without the cancellation of row minus column sums.
  """
  row, column = iotas
  upper = jnp.where(row <= column, 1.0, 0.0).astype(BF16)
  return jnp.sum(jnp.where(row > column, dot(upper, M, passes), 0.0), axis=1)


def row_gates(start_terms, end_terms, whole_term, iotas):
  """dg of a chunk from the gradient times value of e^{b_i}, of e^{b_C - b_i} and of e^{b_C}."""
  row, column = iotas
  dg = jnp.sum(jnp.where(row <= column, start_terms[None, :], 0.0), axis=1)
  if end_terms is not None:
    dg += jnp.sum(jnp.where(row > column, end_terms[None, :], 0.0), axis=1) + whole_term
  return dg


def pick(refs, has_g, has_seg):
  """Splits (fixed..., g?, seg?, rest...) given as (g?, seg?, rest...)."""
  refs = list(refs)
  g_ref = refs.pop(0) if has_g else None
  seg_ref = refs.pop(0) if has_seg else None
  return g_ref, seg_ref, refs


def times_inverse(X, Y, passes, dims=NN):
  """X Y, or X^T Y if dims is TN."""
  out, rest = times_inverse_split(X, Y, passes, dims)
  return out if rest is None else out + rest


def times_inverse_split(X, Y, passes, dims=NN):
  """X Y or X^T Y, and a rest (None if X has none) that a sum of the two would often lose."""
  return dot(X[0], Y, passes, dims), None if len(X) == 1 else dot(X[1], Y, 3, dims)


def load_inverse(X_ref, at):
  return [X_ref[*at, i, :, :] for i in range(X_ref.shape[-3])]


def call(kernel, body, args, out_shape, *, grid, tile, interpret):
  """Runs body on whole arrays, those of args that are not None.

  Bodies address [B L H d] themselves, so no transposed copy is ever made.
  """
  args = [x for x in args if x is not None]
  whole = pl.BlockSpec(memory_space=pl.ANY)
  return pl.pallas_call(
    body,
    grid=grid,
    in_specs=[whole] * len(args),
    out_specs=[whole] * len(out_shape),
    out_shape=out_shape,
    compiler_params=pltriton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    interpret=interpret,
    name=f"delta_rule_{kernel}",
  )(*args)
