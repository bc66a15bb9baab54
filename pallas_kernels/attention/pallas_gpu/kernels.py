"""Causal attention kernels for NVIDIA GPUs; they index [B L H d] directly, without layout copies.

Grid (token block, head, batch). A program owns a token block and loops over blocks of the other
side (keys for queries, queries for keys). The backward kernel processes its block twice, first as
keys (dk, dv), then as queries (dq). One kernel reads q, k, v and do from HBM once and balances the
load under causality: the fewer queries after a block, the more keys before it.

The mask is a range (`mask_ranges`), so masking an element is one comparison. Blocks outside the
range are skipped, and blocks entirely inside are computed without a mask.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.gpu import launch

F32, I32 = jnp.float32, jnp.int32
MASKED_SCORE = -1e30  # finite, so that differences of scores are finite
NN, NT = ((1,), (0,)), ((1,), (1,))


def _dot(a, b, dims, interpret):
  if interpret:  # the CPU lacks some mixed-precision matmuls; in float32 the result is the same
    a, b = a.astype(F32), b.astype(F32)
  return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=F32)


def _div(a, n):
  return lax.div(a, lax.full_like(a, n))  # a Python int would be 64-bit with jax_enable_x64


def _loop(count, times, body, carry):
  """Run body(time, n, carry) for n < count, `times` times.

  One flat loop: two nested loops would keep more values in registers.
  """
  if times == 1:
    return lax.fori_loop(jnp.zeros_like(count), count, functools.partial(body, 0), carry)

  def step(n, carry):
    time = lax.div(n, count)
    return body(time, n - time * count, carry)

  return lax.fori_loop(jnp.zeros_like(count), count * times, step, carry)


def _over_blocks(start, full_start, full_end, end, times, add, carry):
  """Run add(time, block, masked, carry) for start <= block < end.

  Blocks in full_start <= block < full_end need no mask and come after the masked ones. The masked
  blocks start with those after full_end, which contain the diagonal: every query attends to itself,
  so the running maximum is finite after the first block.
  """
  last = end - full_end

  def masked(time, n, carry):
    before = (n >= last).astype(I32)
    return add(time, full_end + n - before * (end - start), True, carry)

  unmasked = lambda time, n, carry: add(time, full_start + n, False, carry)
  carry = _loop(last + full_start - start, times, masked, carry)
  return _loop(full_end - full_start, times, unmasked, carry)


def _tokens(block, size):
  return lax.iota(I32, size) + block * size


def _in_range(largest, distance):
  """Return 0 <= distance [own step] <= largest [own], as one unsigned comparison.

  Distances are relative to values loaded in the same iteration. Relative to a program's own tokens
  they would be loop-invariant up to an offset, and be kept in one register per score.
  """
  return distance.astype(jnp.uint32) <= largest.astype(jnp.uint32)[:, None]


def _over_keys(first_ref, b, i, tile, add, carry):
  """Run add(tokens, mask, carry) over the keys of query block i; mask [own step] or None."""
  own, step = tile.own, tile.step
  start = _div(first_ref[b, i * own], step)
  diagonal = _div(i * own, step)
  full_start = _div(first_ref[b, i * own + own - 1] + (step - 1), step)

  def block(_, j, masked, carry):
    mask = None
    if masked:
      first = first_ref[b, pl.ds(i * own, own)]
      mask = _in_range(_tokens(i, own) - first, _tokens(j, step)[None, :] - first[:, None])
    return add(pl.ds(j * step, step), mask, carry)

  full_start = jnp.minimum(full_start, diagonal)
  return _over_blocks(start, full_start, diagonal, diagonal + own // step, 1, block, carry)


def _over_queries(last_ref, b, j, heads, tile, add, carry):
  """Run add(head, tokens, mask, carry) over the queries, of each head, of key block j."""
  own, step = tile.own, tile.step
  start = _div(j * own, step)
  end = _div(last_ref[b, j * own + own - 1], step) + 1
  full_end = _div(last_ref[b, j * own] + 1, step)

  def block(head, i, masked, carry):
    mask = None
    if masked:
      last = last_ref[b, pl.ds(j * own, own)]
      mask = _in_range(last - _tokens(j, own), last[:, None] - _tokens(i, step)[None, :])
    return add(head, pl.ds(i * step, step), mask, carry)

  full_start = start + own // step
  full_end = jnp.maximum(full_end, full_start)
  return _over_blocks(start, full_start, full_end, end, heads, block, carry)


def _forward_body(first_ref, q_ref, k_ref, v_ref, o_ref, *lse_refs, tile, group, scale, interpret):
  # first [B L]; q, o [B L H d]; k, v [B L Hk d]; log2-sum-exp lse [B H L]
  # Longest programs first, so that none of them is left for the end.
  i, h, b = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
  hk = _div(h, group)
  own, d = tile.own, q_ref.shape[-1]
  rows = pl.ds(i * own, own)
  Q = q_ref[b, rows, h, :]
  dot = functools.partial(_dot, interpret=interpret)

  def add(keys, mask, carry):
    m_before, l, acc = carry
    S = dot(Q, k_ref[b, keys, hk, :], NT) * (scale * math.log2(math.e))
    S = S if mask is None else jnp.where(mask, S, MASKED_SCORE)
    m = jnp.maximum(m_before, jnp.max(S, axis=1))
    P, rescale = jnp.exp2(S - m[:, None]), jnp.exp2(m_before - m)
    l = l * rescale + jnp.sum(P, axis=1)
    return m, l, acc * rescale[:, None] + dot(P.astype(Q.dtype), v_ref[b, keys, hk, :], NN)

  carry = jnp.full((own,), MASKED_SCORE, F32), jnp.zeros((own,), F32), jnp.zeros((own, d), F32)
  m, l, acc = _over_keys(first_ref, b, i, tile, add, carry)
  o_ref[b, rows, h, :] = (acc / l[:, None]).astype(o_ref.dtype)
  for lse_ref in lse_refs:
    lse_ref[b, h, rows] = m + jnp.log2(l)


def _backward_body(
  first_ref, last_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref,
  dq_ref, dk_ref, dv_ref, *, tile, group, scale, interpret,
):  # fmt: skip
  # first, last [B L]; q, do, dq [B L H d]; k, v, dk, dv [B L Hk d]; lse, delta [B H L]
  n, hk, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  own, d = tile.own, q_ref.shape[-1]
  rows = pl.ds(n * own, own)
  scale_2 = scale * math.log2(math.e)
  dot = functools.partial(_dot, interpret=interpret)
  dtype = q_ref.dtype
  zeros = jnp.zeros((own, d), F32)

  K, V = k_ref[b, rows, hk, :], v_ref[b, rows, hk, :]

  def of_keys(head, queries, mask, carry):
    dK, dV = carry
    h = hk * group + head
    Q, dO = q_ref[b, queries, h, :], do_ref[b, queries, h, :]
    # Scores as [keys, queries]: the matmuls with P and dS then need no transpose in registers.
    P = jnp.exp2(dot(K, Q, NT) * scale_2 - lse_ref[b, h, queries][None, :])
    P = P if mask is None else jnp.where(mask, P, 0.0)
    dV += dot(P.astype(dtype), dO, NN)
    dS = P * (dot(V, dO, NT) - delta_ref[b, h, queries][None, :])
    return dK + dot(dS.astype(dtype), Q, NN), dV

  dK, dV = _over_queries(last_ref, b, n, group, tile, of_keys, (zeros, zeros))
  dk_ref[b, rows, hk, :] = (dK * scale).astype(dtype)
  dv_ref[b, rows, hk, :] = dV.astype(dtype)

  def of_head(head, _):
    h = hk * group + head
    Q, dO = q_ref[b, rows, h, :], do_ref[b, rows, h, :]
    lse, delta = lse_ref[b, h, rows][:, None], delta_ref[b, h, rows][:, None]

    def of_queries(keys, mask, dQ):
      K, V = k_ref[b, keys, hk, :], v_ref[b, keys, hk, :]
      P = jnp.exp2(dot(Q, K, NT) * scale_2 - lse)
      P = P if mask is None else jnp.where(mask, P, 0.0)
      dS = P * (dot(dO, V, NT) - delta)
      return dQ + dot(dS.astype(dtype), K, NN)

    dQ = _over_keys(first_ref, b, n, tile, of_queries, zeros)
    dq_ref[b, rows, h, :] = (dQ * scale).astype(dtype)

  lax.fori_loop(jnp.int32(0), jnp.int32(group), of_head, None)


def _call(body, name, args, out_shape, grid, tile, interpret, **options):
  body = functools.partial(body, tile=tile, interpret=interpret, **options)
  options = dict(grid=grid, warps=tile.warps, stages=tile.stages, interpret=interpret)
  return launch(body, name, args, out_shape, **options)


def forward(q, k, v, first, *, tile, save, scale, interpret):
  """Return o [B L H d] and, if `save`, the log2-sum-exp of the scores [B H L] (else None).

  Args:
    q: [B L H d], L a multiple of the tile and d a power of two >= 16.
    k, v: [B L Hk d].
    first: [B L] int32, `mask_ranges.first_keys`.
  """
  B, L, H, _ = q.shape
  out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
  if save:
    out_shape.append(jax.ShapeDtypeStruct((B, H, L), F32))
  options = dict(group=H // k.shape[2], scale=scale)
  grid = (L // tile.own, H, B)
  found = _call(
    _forward_body, "attention_fwd", (first, q, k, v), out_shape, grid, tile, interpret, **options
  )
  return found[0], found[1] if save else None


def backward(q, k, v, first, last, o, lse, do, *, tile, scale, interpret):
  """Return dq, dk, dv of `forward`; last [B L] is `mask_ranges.last_queries`."""
  B, L, H, _ = q.shape
  Hk = k.shape[2]
  delta = jnp.sum(o.astype(F32) * do.astype(F32), axis=3).swapaxes(1, 2)
  return _call(
    _backward_body,
    "attention_bwd",
    (first, last, q, k, v, do, lse, delta),
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
    (L // tile.own, Hk, B),
    tile,
    interpret,
    group=H // Hk,
    scale=scale,
  )
