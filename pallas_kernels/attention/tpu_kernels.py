"""Causal attention on TPU: a lane tile of heads at a time, read from [B L H d] as it lies.

Grid (row, lane tile, block of tokens). The other side's tokens, keys in the forward and queries in
the backward, stay in VMEM for all blocks, so q, k, v, o and their gradients cross HBM once. Scores
are kept transposed, keys by queries: sums over keys then run over sublanes, and what belongs to a
query (which keys it sees, its softmax's sum) is a row.

A query sees the keys from `first` to itself; that is the window, the segment or both. Blocks that
none of its block sees are skipped, and blocks that all of it sees have no mask.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.tiling import TPU_VMEM_LIMIT, cdiv

F32, I32 = jnp.float32, jnp.int32
FAR = -1e30  # a score that does not count: finite, so that differences are
NN, NT = ((1,), (0,)), ((1,), (1,))


class Tile(NamedTuple):
  heads: int  # of a lane tile
  size: int  # of a head
  block: int  # tokens
  scale: float  # of scores
  diagonal: bool  # queries and keys are the same tokens; if not, all queries come after all keys
  interpret: bool

  @property
  def lanes(self):
    return self.heads * self.size

  @property
  def scale_2(self):
    """Of scores as powers of two."""
    return self.scale * math.log2(math.e)


def _dot(tile, a, b, dims):
  if tile.interpret:  # a CPU has no such product of some shapes; in float32 it is the same number
    a, b = a.astype(F32), b.astype(F32)
  return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=F32)


def _only(tile, h, x):
  """x [T lanes] with zeros in the lanes of other heads."""
  if tile.heads == 1:
    return x
  lane = lax.broadcasted_iota(I32, x.shape, 1)
  return jnp.where(lax.div(lane, lax.full_like(lane, tile.size)) == h, x, jnp.zeros_like(x))


def _visible(tile, first, i, j):
  """Which of the keys of block j [T T] the queries of block i see, from `first` [1 T] on."""
  T = tile.block
  key = lax.broadcasted_iota(I32, (T, T), 0) + j * T
  see = key >= first
  return see & (key <= lax.broadcasted_iota(I32, (T, T), 1) + i * T) if tile.diagonal else see


def _loop(start, stop, body):
  lax.fori_loop(start, stop, lambda n, _: body(n), None)


def _forward_body(begin_ref, clear_ref, first_ref, q_ref, k_ref, v_ref, *refs, tile, save):
  # begin, clear [B N]: the first block of keys that a block of queries sees, and the first that all
  # of it see; first [1 T]; q, o [T lanes]; k, v [M lanes]; sums [heads T]
  o_ref, *sums_refs = refs[: 1 + save]
  vT_ref, m_ref, l_ref, acc_ref = refs[1 + save :]
  b, i = pl.program_id(0), pl.program_id(2)
  T, d = tile.block, tile.size
  blocks = k_ref.shape[0] // T
  at = lambda j: pl.ds(pl.multiple_of(j * T, T), T)

  @pl.when(i == 0)
  def _():
    for j in range(blocks):
      vT_ref[:, j * T : (j + 1) * T] = v_ref[j * T : (j + 1) * T, :].T

  m_ref[...] = jnp.full_like(m_ref, FAR)
  l_ref[...] = jnp.zeros_like(l_ref)
  acc_ref[...] = jnp.zeros_like(acc_ref)
  Q = [_only(tile, h, q_ref[...]) for h in range(tile.heads)]

  def add(j, masked):
    K = k_ref[at(j), :]
    see = _visible(tile, first_ref[...], i, j) if masked else None
    for h in range(tile.heads):
      rows, own = slice(h, h + 1), slice(h * d, (h + 1) * d)
      S = _dot(tile, K, Q[h], NT) * tile.scale_2
      S = jnp.where(see, S, FAR) if masked else S
      before = m_ref[rows, :]
      m = jnp.maximum(before, jnp.max(S, axis=0, keepdims=True))
      P, kept = jnp.exp2(S - m), jnp.exp2(before - m)
      m_ref[rows, :] = m
      l_ref[rows, :] = l_ref[rows, :] * kept + jnp.sum(P, axis=0, keepdims=True)
      acc_ref[own, :] = acc_ref[own, :] * kept + _dot(
        tile, vT_ref[own, at(j)], P.astype(K.dtype), NN
      )

  begin, clear = begin_ref[b, i], clear_ref[b, i]
  _loop(clear, i if tile.diagonal else blocks, lambda j: add(j, False))
  _loop(begin, clear, lambda j: add(j, True))
  if tile.diagonal:
    add(i, True)
  # Where no key was seen the sum is 0, and so is o.
  l = jnp.where(l_ref[...] == 0.0, 1.0, l_ref[...])
  O = [acc_ref[h * d : (h + 1) * d, :] / l[h : h + 1] for h in range(tile.heads)]
  o_ref[...] = jnp.concatenate(O, axis=0).T.astype(o_ref.dtype)
  for sums_ref in sums_refs:
    sums_ref[...] = m_ref[...] + jnp.log2(l)


def _backward_body(
  end_ref, clear_ref, first_ref, q_ref, k_ref, v_ref, o_ref, do_ref, sums_ref,
  dq_ref, dk_ref, dv_ref, dqT_ref, delta_ref, kT_ref, dk_sum_ref, dv_sum_ref, *, tile,
):  # fmt: skip
  # end, clear [B N]: the block of queries after the last that sees a block of keys, and the one
  # after the last that sees all of it; first [1 L]; q, o, do, dq [L lanes]; k, v, dk, dv [T lanes];
  # sums [heads L]
  b, j = pl.program_id(0), pl.program_id(2)
  T, d = tile.block, tile.size
  blocks = q_ref.shape[0] // T
  at = lambda i: pl.ds(pl.multiple_of(i * T, T), T)

  @pl.when(j == 0)
  def _():
    dqT_ref[...] = jnp.zeros_like(dqT_ref)
    for i in range(blocks):
      rows = slice(i * T, (i + 1) * T)
      product = (o_ref[rows, :].astype(F32) * do_ref[rows, :].astype(F32)).T
      for h in range(tile.heads):
        delta = jnp.sum(product[h * d : (h + 1) * d], axis=0, keepdims=True)
        delta_ref[h : h + 1, rows] = delta

  dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
  dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)
  K = [_only(tile, h, k_ref[...]) for h in range(tile.heads)]
  V = [_only(tile, h, v_ref[...]) for h in range(tile.heads)]
  kT_ref[...] = k_ref[...].T

  def add(i, masked):
    Q, dO = q_ref[at(i), :], do_ref[at(i), :]
    see = _visible(tile, first_ref[:, at(i)], i, j) if masked else None
    for h in range(tile.heads):
      rows, own = slice(h, h + 1), slice(h * d, (h + 1) * d)
      P = jnp.exp2(_dot(tile, K[h], Q, NT) * tile.scale_2 - sums_ref[rows, at(i)])
      P = jnp.where(see, P, 0.0) if masked else P
      dv_sum_ref[h] += _dot(tile, P.astype(Q.dtype), dO, NN)
      dS = (P * (_dot(tile, V[h], dO, NT) - delta_ref[rows, at(i)])).astype(Q.dtype)
      dk_sum_ref[h] += _dot(tile, dS, Q, NN)
      dqT_ref[own, at(i)] += _dot(tile, kT_ref[own, :], dS, NN)

  end, clear = end_ref[b, j], clear_ref[b, j]
  start = j + 1 if tile.diagonal else 0
  clear = jnp.maximum(clear, start)
  if tile.diagonal:
    add(j, True)
  _loop(start, clear, lambda i: add(i, False))
  _loop(clear, end, lambda i: add(i, True))
  total = lambda ref: sum(_only(tile, h, ref[h]) for h in range(tile.heads))
  dk_ref[...] = (total(dk_sum_ref) * tile.scale).astype(dk_ref.dtype)
  dv_ref[...] = total(dv_sum_ref).astype(dv_ref.dtype)

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    for i in range(blocks):
      rows = slice(i * T, (i + 1) * T)
      dq_ref[rows, :] = (dqT_ref[:, rows] * tile.scale).T.astype(dq_ref.dtype)


def _edges(first, T):
  """Of each block of queries the first key that its first query sees, and that its last one does.

  Later queries see no earlier key: `first` [B L] never falls.
  """
  return first[:, ::T], first[:, T - 1 :: T]


def _call(body, name, bounds, args, in_specs, out_specs, out_shape, grid, scratch, interpret):
  run = pl.pallas_call(
    body,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(bounds),
      grid=grid,
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=scratch,
    ),
    out_shape=out_shape,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=TPU_VMEM_LIMIT
    ),
    interpret=interpret,
    name=name,
  )
  with jax.enable_x64(False):  # Python's numbers would be of 64 bits, which the compiler refuses
    return run(*bounds, *args)


def _specs(tile, shape):
  """Blocks of [B tokens D], whole rows of it, and the same of one number a token [B tiles .. L]."""
  T, (_, L, _) = tile.block, shape
  return dict(
    block=pl.BlockSpec((None, T, tile.lanes), lambda b, c, n, *_: (b, n, c)),
    row=pl.BlockSpec((None, L, tile.lanes), lambda b, c, n, *_: (b, 0, c)),
    first_block=pl.BlockSpec((None, 1, T), lambda b, c, n, *_: (b, 0, n)),
    first_row=pl.BlockSpec((None, 1, L), lambda b, c, n, *_: (b, 0, 0)),
    sums_block=pl.BlockSpec((None, None, tile.heads, T), lambda b, c, n, *_: (b, c, 0, n)),
    sums_row=pl.BlockSpec((None, None, tile.heads, L), lambda b, c, n, *_: (b, c, 0, 0)),
  )


def forward(q, k, v, first, *, tile, save, dtype):
  """o [B L D] in `dtype` and, to save it, log2 of each softmax's sum [B tiles heads L].

  Args:
    q: [B L D] and k, v: [B M D], heads side by side; L and M are whole blocks.
    first: [B L] int32, the first key that a query sees; may be below 0 or above M.
  """
  B, L, D = q.shape
  M, T = k.shape[1], tile.block
  N, tiles = L // T, D // tile.lanes
  limit = jnp.arange(N, dtype=I32)[None] if tile.diagonal else jnp.int32(M // T)
  head, tail = _edges(first, T)
  begin = jnp.clip(head // T, 0, limit)
  clear = jnp.clip(cdiv(tail, T), begin, limit)
  of_queries, of_keys = _specs(tile, q.shape), _specs(tile, k.shape)
  out_specs, out_shape = [of_queries["block"]], [jax.ShapeDtypeStruct(q.shape, dtype)]
  if save:
    out_specs.append(of_queries["sums_block"])
    out_shape.append(jax.ShapeDtypeStruct((B, tiles, tile.heads, L), F32))
  found = _call(
    functools.partial(_forward_body, tile=tile, save=save),
    "attention_fwd",
    (begin, clear),
    (first[:, None], q, k, v),
    [of_queries["first_block"], of_queries["block"], of_keys["row"], of_keys["row"]],
    out_specs,
    out_shape,
    (B, tiles, N),
    [
      pltpu.VMEM((tile.lanes, M), v.dtype),
      pltpu.VMEM((tile.heads, T), F32),
      pltpu.VMEM((tile.heads, T), F32),
      pltpu.VMEM((tile.lanes, T), F32),
    ],
    tile.interpret,
  )
  return found[0], found[1] if save else None


def backward(q, k, v, first, o, sums, do, *, tile, dtype):
  """dq, dk, dv in `dtype`, of arguments and results of `forward`."""
  (B, L, D), M, T = q.shape, k.shape[1], tile.block
  head, tail = _edges(first, T)
  keys = jnp.arange(M // T, dtype=I32)[None, :, None] * T
  end = jnp.sum(head[:, None] < keys + T, axis=2, dtype=I32)
  clear = jnp.sum(tail[:, None] <= keys, axis=2, dtype=I32)
  of_queries, of_keys = _specs(tile, q.shape), _specs(tile, k.shape)
  row, block = of_queries["row"], of_keys["block"]
  return _call(
    functools.partial(_backward_body, tile=tile),
    "attention_bwd",
    (end, clear),
    (first[:, None], q, k, v, o, do, sums),
    [of_queries["first_row"], row, block, block, row, row, of_queries["sums_row"]],
    [row, block, block],
    [jax.ShapeDtypeStruct(x.shape, dtype) for x in (q, k, v)],
    (B, D // tile.lanes, M // T),
    [
      pltpu.VMEM((tile.lanes, L), F32),
      pltpu.VMEM((tile.heads, L), F32),
      pltpu.VMEM((tile.lanes, T), k.dtype),
      pltpu.VMEM((tile.heads, T, tile.lanes), F32),
      pltpu.VMEM((tile.heads, T, tile.lanes), F32),
    ],
    tile.interpret,
  )
