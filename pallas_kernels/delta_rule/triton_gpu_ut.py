"""Intra-chunk UT transform for NVIDIA GPUs (Pallas, Triton lowering), forward and backward.

Also holds what the fused kernels share: split dots, the stable inverse, decays of a chunk.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.delta_rule.triton_gpu_tiles import tile_for

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
  """`count` bfloat16 arrays with the sum x (+ rest, of digits below x's), each 2^-9 of the last."""
  if x.dtype == BF16:
    return [x]
  parts = []
  for i in range(count):
    x = x + rest if rest is not None and i + 1 == count else x
    parts.append(x.astype(BF16))
    x = x - parts[-1].astype(F32)
  return parts


def dot(a, b, passes, dims=NN, rest=None):
  """a b in float32 out of 1, 3 or 6 bf16 products; a bfloat16 operand is exact as it is.

  Split by hand so that the rounding is the same in interpret mode as on the GPU.
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


def _gram(k_ref, b, rows, h, block):
  """K K^T and, for float32, what rounding it to float32 took away (else None).

  Repeated keys lose the same digits in every entry and chunk, and with beta = 2 nothing damps them:
  the error grows with the length, to 1e-4 after 4096 tokens.
  """
  block = min(block, k_ref.shape[-1])
  count = k_ref.shape[-1] // block
  load = lambda i: k_ref[b, rows, h, pl.ds(i * block, block)]
  chunk = rows.size
  square = jnp.zeros((chunk, chunk), F32)
  if k_ref.dtype != F32:
    return lax.fori_loop(0, count, lambda i, G: G + dot(load(i), load(i), 1, NT), square), None

  def over_columns(i, largest):
    return jnp.maximum(largest, jnp.max(jnp.abs(load(i)), axis=1))

  # Adding the shift rounds a row to at most 128 steps of a power of two: bfloat16 holds them, and
  # sums of up to 256 of their products are exact.
  largest = lax.fori_loop(0, count, over_columns, jnp.zeros((chunk,), F32))
  shift = (largest * 2.0**17)[:, None]

  def over_products(i, sums):
    K = load(i)
    coarse = (K + shift) - shift
    fine = K - coarse
    coarse_bf16 = coarse.astype(BF16)
    exact = sums[0] + dot(coarse_bf16, coarse_bf16, 1, NT)
    return exact, sums[1] + dot(fine, coarse + 0.5 * fine, FLOAT32_PASSES, NT)

  exact, half = lax.fori_loop(0, count, over_products, (square, square))
  small = half + half.T
  G = exact + small
  return G, (exact - G) + small


def _store_inverse(X_ref, at, gram, scores, precision, iotas, zero):
  """Writes X = (I + A)^-1 to X_ref [at, 0], and a rest below its last digit to [at, 1] if asked.

  Returns what `times_inverse` takes. Added to X, the rest would be rounded away.
  """
  A, missing = (None if G is None else strict_lower(G * scores, iotas) for G in gram)
  X = [unit_lower_inverse(A, precision, iotas, zero)]
  if missing is not None:
    X.append(-dot(X[0], dot(missing, X[0], 3), 3))
  for i, x in enumerate(X):
    X_ref[*at, i, :, :] = x.astype(X_ref.dtype)
  return X


def times_inverse(X, Y, passes, dims=NN):
  """X Y, or X^T Y if dims is TN."""
  out, rest = times_inverse_split(X, Y, passes, dims)
  return out if rest is None else out + rest


def times_inverse_split(X, Y, passes, dims=NN):
  """X Y or X^T Y, and a rest (None if X has none) that a sum of the two would often lose."""
  return dot(X[0], Y, passes, dims), None if len(X) == 1 else dot(X[1], Y, 3, dims)


def load_inverse(X_ref, at):
  return [X_ref[*at, i, :, :] for i in range(X_ref.shape[-3])]


def inverse_shape(N, B, Hv, chunk, dtype):
  """[N B Hv parts C C]: X, and for float32 its rest."""
  return jax.ShapeDtypeStruct((N, B, Hv, 2 if dtype == F32 else 1, chunk, chunk), dtype)


def _blocks(size, block):
  block = min(size, block)
  return [pl.ds(i, block) for i in range(0, size, block)]


def _forward_body(k_ref, v_ref, beta_ref, *refs, has_g, has_seg, group, chunk, tile, precision):
  # k [B L H dk], v [B L Hv dv], beta [B L Hv] -> X [N B Hv C C], W [N B Hv C dk], U [N B Hv C dv]
  g_ref, seg_ref, (X_ref, W_ref, U_ref) = pick(refs, has_g, has_seg)
  n, h, b, hk = program_ids(group)
  passes = passes_for(k_ref.dtype)
  rows, beta, zero, iotas, decay = load_chunk(beta_ref, g_ref, seg_ref, n, b, h, chunk)
  key_blocks = _blocks(k_ref.shape[-1], tile.block_k)
  gram = _gram(k_ref, b, rows, hk, tile.block_k)
  scores = decay.inside() * beta[:, None]
  X = _store_inverse(X_ref, (n, b, h), gram, scores, precision, iotas, zero)
  row_scale = beta if decay.start is None else beta * decay.start
  for cols in key_blocks:
    K = k_ref[b, rows, hk, cols].astype(F32) * row_scale[:, None]
    W_ref[n, b, h, :, cols] = times_inverse(X, K, passes).astype(W_ref.dtype)
  for cols in _blocks(v_ref.shape[-1], tile.block_v):
    V = v_ref[b, rows, h, cols].astype(F32) * beta[:, None]
    U_ref[n, b, h, :, cols] = times_inverse(X, V, passes).astype(U_ref.dtype)


def _intra_body(q_ref, k_ref, beta_ref, *refs, has_g, has_seg, group, scale, block_k, precision):
  # -> P = scale QK^T with masks and decays [N B Hv C C], and X likewise unless precision is None
  g_ref, seg_ref, (P_ref, *X_refs) = pick(refs, has_g, has_seg)
  chunk = P_ref.shape[-1]
  n, h, b, hk = program_ids(group)
  passes = passes_for(k_ref.dtype)
  rows, beta, zero, iotas, decay = load_chunk(beta_ref, g_ref, seg_ref, n, b, h, chunk)
  for X_ref in X_refs:
    gram = _gram(k_ref, b, rows, hk, block_k)
    scores = decay.inside() * beta[:, None]
    _store_inverse(X_ref, (n, b, h), gram, scores, precision, iotas, zero)

  def over_keys(i, P):
    cols = pl.ds(i * block_k, block_k)
    return P + dot(q_ref[b, rows, hk, cols], k_ref[b, rows, hk, cols], passes, NT)

  P = jnp.zeros((chunk, chunk), F32)
  P = lax.fori_loop(0, k_ref.shape[-1] // block_k, over_keys, P)
  P_ref[n, b, h, :, :] = (P * decay.inside() * scale).astype(P_ref.dtype)


def _backward_body(k_ref, v_ref, beta_ref, *refs, has_g, has_seg, group, chunk, tile):
  # X, W, U, dW, dU [N B Hv C .] -> dk [B L Hv dk], dv [B L Hv dv], dbeta, dg [B L Hv]
  g_ref, seg_ref, refs = pick(refs, has_g, has_seg)
  X_ref, W_ref, U_ref, dW_ref, dU_ref, dk_ref, dv_ref, dbeta_ref = refs[:8]
  n, h, b, hk = program_ids(group)
  passes = passes_for(k_ref.dtype)
  rows, beta, zero, iotas, decay = load_chunk(beta_ref, g_ref, seg_ref, n, b, h, chunk)
  zeros = jnp.zeros((chunk,), F32)
  square = jnp.zeros((chunk, chunk), F32)
  block_k, block_v = min(tile.block_k, k_ref.shape[-1]), min(tile.block_v, v_ref.shape[-1])
  key_count = k_ref.shape[-1] // block_k
  X = lambda: load_inverse(X_ref, (n, b, h))

  # Loops, not unrolled blocks: fewer addresses and product descriptors live at once.
  def over_values(i, carry):
    dA, dbeta = carry
    cols = pl.ds(i * block_v, block_v)
    dY = times_inverse(X(), dU_ref[n, b, h, :, cols], passes, TN)
    dA -= dot(dY, U_ref[n, b, h, :, cols], passes, NT)
    dv_ref[b, rows, h, cols] = (dY * beta[:, None]).astype(dv_ref.dtype)
    return dA, dbeta + jnp.sum(dY * v_ref[b, rows, h, cols].astype(F32), axis=1)

  def over_erase(i, carry):
    dA, erase = carry
    cols = pl.ds(i * block_k, block_k)
    dY = times_inverse(X(), dW_ref[n, b, h, :, cols], passes, TN)
    dA -= dot(dY, W_ref[n, b, h, :, cols], passes, NT)
    return dA, erase + jnp.sum(dY * k_ref[b, rows, hk, cols].astype(F32), axis=1)

  def over_gram(i, G):
    K = k_ref[b, rows, hk, pl.ds(i * block_k, block_k)]
    return G + dot(K, K, passes, NT)

  dA, dbeta = lax.fori_loop(0, v_ref.shape[-1] // block_v, over_values, (square, zeros))
  dA, erase = lax.fori_loop(0, key_count, over_erase, (dA, zeros))
  erase = erase if decay.start is None else erase * decay.start
  dA = strict_lower(dA * decay.inside(), iotas)
  G = lax.fori_loop(0, key_count, over_gram, square)
  dbeta_ref[b, rows, h] = dbeta + erase + jnp.sum(dA * G, axis=1)
  dG = dA * beta[:, None]
  if has_g:
    dg = row_gates(erase * beta, None, None, iotas) + score_gates(dG * G, passes, iotas)
    refs[8][b, rows, h] = dg
  dG = dG.astype(k_ref.dtype)
  row_scale = beta if decay.start is None else beta * decay.start

  def over_keys(i, _):
    cols = pl.ds(i * block_k, block_k)
    K = k_ref[b, rows, hk, cols]
    # X^T dW again rather than kept: one product against C dk live registers.
    dK = times_inverse(X(), dW_ref[n, b, h, :, cols], passes, TN) * row_scale[:, None]
    dK += dot(dG, K, passes) + dot(dG, K, passes, TN)
    dk_ref[b, rows, h, cols] = dK.astype(dk_ref.dtype)

  lax.fori_loop(0, key_count, over_keys, None)


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


def ut_transform(
  k, v, beta, g=None, seg=None, *, chunk, inverse_precision, tile=None, interpret=False
):
  """X = (I + A)^-1, W = X (beta e^b K), U = X (beta V) of every chunk, as [N B Hv C .].

  X has an axis before its last two: for float32 it is the sum of two parts.
  seg [B L] counts the segments seen so far (0 at the first token); L is a multiple of chunk and
  the head sizes are powers of two of at least 16. Outputs have k's dtype.
  """
  B, L, H, dk = k.shape
  Hv, dv = v.shape[2:]
  N = L // chunk
  tile = tile or tile_for("ut_fwd", k)
  body = functools.partial(
    _forward_body,
    has_g=g is not None,
    has_seg=seg is not None,
    group=Hv // H,
    chunk=chunk,
    tile=tile,
    precision=inverse_precision,
  )
  out_shape = [
    inverse_shape(N, B, Hv, chunk, k.dtype),
    *(jax.ShapeDtypeStruct((N, B, Hv, chunk, d), k.dtype) for d in (dk, dv)),
  ]
  options = dict(grid=(N, Hv, B), tile=tile, interpret=interpret)
  return call("ut_fwd", body, (k, v, beta, g, seg), out_shape, **options)


def ut_transform_bwd(k, v, beta, g, seg, X, W, U, dW, dU, *, chunk, tile=None, interpret=False):
  """Gradients (dk, dv, dbeta, dg) of ut_transform; dk is summed over the value heads of a key."""
  B, L, H, dk = k.shape
  Hv = v.shape[2]
  group = Hv // H
  tile = tile or tile_for("ut_bwd", k)
  body = functools.partial(
    _backward_body,
    has_g=g is not None,
    has_seg=seg is not None,
    group=group,
    chunk=chunk,
    tile=tile,
  )
  gates = jax.ShapeDtypeStruct((B, L, Hv), F32)
  out_shape = [
    jax.ShapeDtypeStruct((B, L, Hv, dk), k.dtype if group == 1 else F32),
    jax.ShapeDtypeStruct(v.shape, v.dtype),
    gates,
  ] + ([gates] if g is not None else [])
  args = (k, v, beta, g, seg, X, W, U, dW, dU)
  options = dict(grid=(L // chunk, Hv, B), tile=tile, interpret=interpret)
  dk_heads, dV, dbeta, *dg = call("ut_bwd", body, args, out_shape, **options)
  dK = dk_heads.reshape(B, L, H, group, dk).sum(3).astype(k.dtype) if group > 1 else dk_heads
  dg = dg[0].astype(g.dtype) if g is not None else None
  return dK, dV, dbeta.astype(beta.dtype), dg


def intra(q, k, beta, g, seg, *, scale, chunk, inverse_precision, tile=None, interpret=False):
  """[P, X] of every chunk in k's dtype; [P] alone if inverse_precision is None.

  P is [N B Hv C C]; X has an axis before its last two: for float32 it is the sum of two parts.
  """
  B, L, H, dk = k.shape
  Hv = beta.shape[2]
  kernel = "scores" if inverse_precision is None else "intra"
  tile = tile or tile_for(kernel, k)
  body = functools.partial(
    _intra_body,
    has_g=g is not None,
    has_seg=seg is not None,
    group=Hv // H,
    scale=scale,
    block_k=min(tile.block_k, dk),
    precision=inverse_precision,
  )
  out_shape = [jax.ShapeDtypeStruct((L // chunk, B, Hv, chunk, chunk), k.dtype)]
  if inverse_precision is not None:
    out_shape.append(inverse_shape(L // chunk, B, Hv, chunk, k.dtype))
  options = dict(grid=(L // chunk, Hv, B), tile=tile, interpret=interpret)
  return call(kernel, body, (q, k, beta, g, seg), out_shape, **options)
