"""Causal attention kernels for TPU: one lane tile of heads at a time, read from [B L H*d].

Grid (batch, lane tile, token block). The other side, keys in the forward and queries in the
backward pass, stays in VMEM for all blocks, so that q, k, v, o and their gradients cross HBM once.
Scores are transposed, [keys, queries]: reductions over keys run over sublanes, and per-query values
(first key, log-sum-exp) are rows.

A query attends to the keys `first` .. itself (`mask_ranges`). Key blocks that no query of a block
attends to are skipped; blocks that all of them attend to are computed without a mask.
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
MASKED_SCORE = -1e30  # finite, so that differences of scores are finite
NN, NT = ((1,), (0,)), ((1,), (1,))


class AttentionTileTPU(NamedTuple):
  """Static parameters of a kernel."""

  heads: int  # heads per lane tile
  size: int  # padded head size
  block: int  # tokens per block
  scale: float  # factor of the scores
  diagonal: bool  # queries and keys are the same tokens; else all queries come after all keys
  interpret: bool

  @property
  def lanes(self):
    return self.heads * self.size

  @property
  def scale_2(self):
    """Factor of the scores as exponents of 2."""
    return self.scale * math.log2(math.e)


def _dot(tile, a, b, dims):
  if (
    tile.interpret
  ):  # the CPU lacks some mixed-precision matmuls; in float32 the result is the same
    a, b = a.astype(F32), b.astype(F32)
  return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=F32)


def _mask_lanes(tile, h, x):
  """Return x [T lanes] with zeros in the lanes of heads other than h."""
  if tile.heads == 1:
    return x
  lane = lax.broadcasted_iota(I32, x.shape, 1)
  return jnp.where(lax.div(lane, lax.full_like(lane, tile.size)) == h, x, jnp.zeros_like(x))


def _visible(tile, first, i, j):
  """Return the mask [keys, queries] of key block j and query block i; first [1 T]."""
  T = tile.block
  key = lax.broadcasted_iota(I32, (T, T), 0) + j * T
  mask = key >= first
  return mask & (key <= lax.broadcasted_iota(I32, (T, T), 1) + i * T) if tile.diagonal else mask


def _loop(start, stop, body):
  lax.fori_loop(start, stop, lambda n, _: body(n), None)


def _forward_body(start_ref, full_start_ref, first_ref, q_ref, k_ref, v_ref, *refs, tile, save):
  # start, full_start [B N]: per query block the first key block that some query attends to, and the
  # first that all do; first [1 T]; q, o [T lanes]; k, v [M lanes]; log2-sum-exp lse [heads T]
  o_ref, *lse_refs = refs[: 1 + save]
  vT_ref, m_ref, l_ref, acc_ref = refs[1 + save :]
  b, i = pl.program_id(0), pl.program_id(2)
  T, d = tile.block, tile.size
  blocks = k_ref.shape[0] // T
  at = lambda j: pl.ds(pl.multiple_of(j * T, T), T)

  @pl.when(i == 0)
  def _():
    for j in range(blocks):
      vT_ref[:, j * T : (j + 1) * T] = v_ref[j * T : (j + 1) * T, :].T

  m_ref[...] = jnp.full_like(m_ref, MASKED_SCORE)
  l_ref[...] = jnp.zeros_like(l_ref)
  acc_ref[...] = jnp.zeros_like(acc_ref)
  Q = [_mask_lanes(tile, h, q_ref[...]) for h in range(tile.heads)]

  def add(j, masked):
    K = k_ref[at(j), :]
    mask = _visible(tile, first_ref[...], i, j) if masked else None
    for h in range(tile.heads):
      rows, own = slice(h, h + 1), slice(h * d, (h + 1) * d)
      S = _dot(tile, K, Q[h], NT) * tile.scale_2
      S = jnp.where(mask, S, MASKED_SCORE) if masked else S
      m_before = m_ref[rows, :]
      m = jnp.maximum(m_before, jnp.max(S, axis=0, keepdims=True))
      P, rescale = jnp.exp2(S - m), jnp.exp2(m_before - m)
      m_ref[rows, :] = m
      l_ref[rows, :] = l_ref[rows, :] * rescale + jnp.sum(P, axis=0, keepdims=True)
      acc_ref[own, :] = acc_ref[own, :] * rescale + _dot(
        tile, vT_ref[own, at(j)], P.astype(K.dtype), NN
      )

  start, full_start = start_ref[b, i], full_start_ref[b, i]
  _loop(full_start, i if tile.diagonal else blocks, lambda j: add(j, False))
  _loop(start, full_start, lambda j: add(j, True))
  if tile.diagonal:
    add(i, True)
  # A query without keys has sum 0, and gets o = 0.
  l = jnp.where(l_ref[...] == 0.0, 1.0, l_ref[...])
  O = [acc_ref[h * d : (h + 1) * d, :] / l[h : h + 1] for h in range(tile.heads)]
  o_ref[...] = jnp.concatenate(O, axis=0).T.astype(o_ref.dtype)
  for lse_ref in lse_refs:
    lse_ref[...] = m_ref[...] + jnp.log2(l)


def _backward_body(
  end_ref, full_end_ref, first_ref, q_ref, k_ref, v_ref, o_ref, do_ref, lse_ref,
  dq_ref, dk_ref, dv_ref, dqT_ref, delta_ref, kT_ref, dk_sum_ref, dv_sum_ref, *, tile,
):  # fmt: skip
  # end, full_end [B N]: per key block the end of the query blocks that attend to some of it, and to
  # all of it; first [1 L]; q, o, do, dq [L lanes]; k, v, dk, dv [T lanes]; lse [heads L]
  b, j = pl.program_id(0), pl.program_id(2)
  T, d = tile.block, tile.size
  blocks = q_ref.shape[0] // T
  at = lambda i: pl.ds(pl.multiple_of(i * T, T), T)

  @pl.when(j == 0)
  def _():
    dqT_ref[...] = jnp.zeros_like(dqT_ref)
    for i in range(blocks):
      rows = slice(i * T, (i + 1) * T)
      o_do = (o_ref[rows, :].astype(F32) * do_ref[rows, :].astype(F32)).T
      for h in range(tile.heads):
        delta = jnp.sum(o_do[h * d : (h + 1) * d], axis=0, keepdims=True)
        delta_ref[h : h + 1, rows] = delta

  dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
  dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)
  K = [_mask_lanes(tile, h, k_ref[...]) for h in range(tile.heads)]
  V = [_mask_lanes(tile, h, v_ref[...]) for h in range(tile.heads)]
  kT_ref[...] = k_ref[...].T

  def add(i, masked):
    Q, dO = q_ref[at(i), :], do_ref[at(i), :]
    mask = _visible(tile, first_ref[:, at(i)], i, j) if masked else None
    for h in range(tile.heads):
      rows, own = slice(h, h + 1), slice(h * d, (h + 1) * d)
      P = jnp.exp2(_dot(tile, K[h], Q, NT) * tile.scale_2 - lse_ref[rows, at(i)])
      P = jnp.where(mask, P, 0.0) if masked else P
      dv_sum_ref[h] += _dot(tile, P.astype(Q.dtype), dO, NN)
      dS = (P * (_dot(tile, V[h], dO, NT) - delta_ref[rows, at(i)])).astype(Q.dtype)
      dk_sum_ref[h] += _dot(tile, dS, Q, NN)
      dqT_ref[own, at(i)] += _dot(tile, kT_ref[own, :], dS, NN)

  end, full_end = end_ref[b, j], full_end_ref[b, j]
  start = j + 1 if tile.diagonal else 0
  full_end = jnp.maximum(full_end, start)
  if tile.diagonal:
    add(j, True)
  _loop(start, full_end, lambda i: add(i, False))
  _loop(full_end, end, lambda i: add(i, True))
  total = lambda ref: sum(_mask_lanes(tile, h, ref[h]) for h in range(tile.heads))
  dk_ref[...] = (total(dk_sum_ref) * tile.scale).astype(dk_ref.dtype)
  dv_ref[...] = total(dv_sum_ref).astype(dv_ref.dtype)

  @pl.when(j == pl.num_programs(2) - 1)
  def _():
    for i in range(blocks):
      rows = slice(i * T, (i + 1) * T)
      dq_ref[rows, :] = (dqT_ref[:, rows] * tile.scale).T.astype(dq_ref.dtype)


def _edges(first, T):
  """Return, per query block, the first key of its first query and of its last query.

  `first` [B L] is non-decreasing, so these are the extremes of the block.
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
  with jax.enable_x64(False):  # Python ints would be 64-bit, which the compiler does not support
    return run(*bounds, *args)


def _specs(tile, shape):
  """Block specs of [B tokens D] and of per-token values: one block, or the full sequence."""
  T, (_, L, _) = tile.block, shape
  return dict(
    block=pl.BlockSpec((None, T, tile.lanes), lambda b, c, n, *_: (b, n, c)),
    sequence=pl.BlockSpec((None, L, tile.lanes), lambda b, c, n, *_: (b, 0, c)),
    first_block=pl.BlockSpec((None, 1, T), lambda b, c, n, *_: (b, 0, n)),
    first_sequence=pl.BlockSpec((None, 1, L), lambda b, c, n, *_: (b, 0, 0)),
    lse_block=pl.BlockSpec((None, None, tile.heads, T), lambda b, c, n, *_: (b, c, 0, n)),
    lse_sequence=pl.BlockSpec((None, None, tile.heads, L), lambda b, c, n, *_: (b, c, 0, 0)),
  )


def forward(q, k, v, first, *, tile, save, dtype):
  """Return o [B L D] in `dtype` and, if `save`, the log2-sum-exp of scores [B tiles heads L].

  Args:
    q: [B L D], heads concatenated; L a multiple of the block.
    k, v: [B M D], M a multiple of the block.
    first: [B L] int32, the first key that a query attends to; may be < 0 or > M.
  """
  B, L, D = q.shape
  M, T = k.shape[1], tile.block
  N, tiles = L // T, D // tile.lanes
  limit = jnp.arange(N, dtype=I32)[None] if tile.diagonal else jnp.int32(M // T)
  head, tail = _edges(first, T)
  start = jnp.clip(head // T, 0, limit)
  full_start = jnp.clip(cdiv(tail, T), start, limit)
  of_queries, of_keys = _specs(tile, q.shape), _specs(tile, k.shape)
  out_specs, out_shape = [of_queries["block"]], [jax.ShapeDtypeStruct(q.shape, dtype)]
  if save:
    out_specs.append(of_queries["lse_block"])
    out_shape.append(jax.ShapeDtypeStruct((B, tiles, tile.heads, L), F32))
  found = _call(
    functools.partial(_forward_body, tile=tile, save=save),
    "attention_fwd",
    (start, full_start),
    (first[:, None], q, k, v),
    [of_queries["first_block"], of_queries["block"], of_keys["sequence"], of_keys["sequence"]],
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


def backward(q, k, v, first, o, lse, do, *, tile, dtype):
  """Return dq, dk, dv of `forward` in `dtype`."""
  (B, L, D), M, T = q.shape, k.shape[1], tile.block
  head, tail = _edges(first, T)
  keys = jnp.arange(M // T, dtype=I32)[None, :, None] * T
  end = jnp.sum(head[:, None] < keys + T, axis=2, dtype=I32)
  full_end = jnp.sum(tail[:, None] <= keys, axis=2, dtype=I32)
  of_queries, of_keys = _specs(tile, q.shape), _specs(tile, k.shape)
  sequence, block = of_queries["sequence"], of_keys["block"]
  return _call(
    functools.partial(_backward_body, tile=tile),
    "attention_bwd",
    (end, full_end),
    (first[:, None], q, k, v, o, do, lse),
    [
      of_queries["first_sequence"],
      sequence,
      block,
      block,
      sequence,
      sequence,
      of_queries["lse_sequence"],
    ],
    [sequence, block, block],
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
