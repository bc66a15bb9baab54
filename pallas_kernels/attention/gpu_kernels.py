"""Causal attention on NVIDIA GPUs: heads are read from [B L H d] where they lie.

Grid (block of tokens, head, row). A program owns a block and takes the other side's tokens, keys
for queries and queries for keys, some at a time. In the backward it owns the same block twice,
first as keys (dk, dv) and then as queries (dq): one kernel, so that q, k, v and do cross HBM once
and all programs have like work, the fewer queries after a block the more keys before it.

A query sees the keys from its first, the later of window and segment, to itself, and a key is seen
by the queries from itself to its last. So a mask is one comparison, blocks that are not seen are
skipped, and those that are seen whole have no mask.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.gpu import call

F32, I32 = jnp.float32, jnp.int32
FAR = -1e30  # a score that does not count: finite, so that differences are
NN, NT = ((1,), (0,)), ((1,), (1,))


def _dot(a, b, dims, interpret):
  if interpret:  # a CPU has no such product of some dtypes; in float32 it is the same number
    a, b = a.astype(F32), b.astype(F32)
  return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=F32)


def _div(a, n):
  return lax.div(a, lax.full_like(a, n))  # a Python number would divide in 64 bits under x64


def _loop(count, times, body, carry):
  """body(time, n, carry) for n < count, `times` times over: one loop, two would keep more."""
  if times == 1:
    return lax.fori_loop(jnp.zeros_like(count), count, functools.partial(body, 0), carry)

  def step(n, carry):
    time = lax.div(n, count)
    return body(time, n - time * count, carry)

  return lax.fori_loop(jnp.zeros_like(count), count * times, step, carry)


def _over_blocks(start, clear, until, end, times, add, carry):
  """add(time, block, masked, carry) for blocks start .. end; clear .. until of them need no mask.

  Those that do come first, and of them the last ones: a query's own key, which it does see.
  """
  last = end - until

  def masked(time, n, carry):
    before = (n >= last).astype(I32)
    return add(time, until + n - before * (end - start), True, carry)

  carry = _loop(last + clear - start, times, masked, carry)
  return _loop(until - clear, times, lambda x, n, carry: add(x, clear + n, False, carry), carry)


def _tokens(block, size):
  return lax.iota(I32, size) + block * size


def _up_to(most, distance):
  """Where distance [own step] is 0 .. most [own]: one comparison, as numbers without a sign.

  Distances are from what was loaded in the same round. Those from a program's own tokens would be
  the same in every round but for one number, and be kept in registers, one for each score.
  """
  return distance.astype(jnp.uint32) <= most.astype(jnp.uint32)[:, None]


def _over_keys(first_ref, b, i, tile, add, carry):
  """add(tokens, see, carry) for the keys that block i of queries sees; see [own step] or None."""
  own, step = tile.own, tile.step
  start = _div(first_ref[b, i * own], step)
  diagonal = _div(i * own, step)
  clear = _div(first_ref[b, i * own + own - 1] + (step - 1), step)

  def block(_, j, masked, carry):
    see = None
    if masked:
      first = first_ref[b, pl.ds(i * own, own)]
      see = _up_to(_tokens(i, own) - first, _tokens(j, step)[None, :] - first[:, None])
    return add(pl.ds(j * step, step), see, carry)

  clear = jnp.minimum(clear, diagonal)
  return _over_blocks(start, clear, diagonal, diagonal + own // step, 1, block, carry)


def _over_queries(last_ref, b, j, heads, tile, add, carry):
  """add(head, tokens, see, carry) for the queries of each head that see block j of keys."""
  own, step = tile.own, tile.step
  start = _div(j * own, step)
  end = _div(last_ref[b, j * own + own - 1], step) + 1
  until = _div(last_ref[b, j * own] + 1, step)

  def block(head, i, masked, carry):
    see = None
    if masked:
      last = last_ref[b, pl.ds(j * own, own)]
      see = _up_to(last - _tokens(j, own), last[:, None] - _tokens(i, step)[None, :])
    return add(head, pl.ds(i * step, step), see, carry)

  clear = start + own // step
  return _over_blocks(start, clear, jnp.maximum(until, clear), end, heads, block, carry)


def _forward_body(first_ref, q_ref, k_ref, v_ref, o_ref, *sums_refs, tile, group, scale, interpret):
  # first [B L]; q, o [B L H d]; k, v [B L Hk d]; sums [B H L]
  # The longest first: those that start last should not be waited for.
  i, h, b = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
  hk = _div(h, group)
  own, d = tile.own, q_ref.shape[-1]
  rows = pl.ds(i * own, own)
  Q = q_ref[b, rows, h, :]
  dot = functools.partial(_dot, interpret=interpret)

  def add(keys, see, carry):
    before, l, acc = carry
    S = dot(Q, k_ref[b, keys, hk, :], NT) * (scale * math.log2(math.e))
    S = S if see is None else jnp.where(see, S, FAR)
    m = jnp.maximum(before, jnp.max(S, axis=1))
    P, kept = jnp.exp2(S - m[:, None]), jnp.exp2(before - m)
    l = l * kept + jnp.sum(P, axis=1)
    return m, l, acc * kept[:, None] + dot(P.astype(Q.dtype), v_ref[b, keys, hk, :], NN)

  carry = jnp.full((own,), FAR, F32), jnp.zeros((own,), F32), jnp.zeros((own, d), F32)
  m, l, acc = _over_keys(first_ref, b, i, tile, add, carry)
  o_ref[b, rows, h, :] = (acc / l[:, None]).astype(o_ref.dtype)
  for sums_ref in sums_refs:
    sums_ref[b, h, rows] = m + jnp.log2(l)


def _backward_body(
  first_ref, last_ref, q_ref, k_ref, v_ref, do_ref, sums_ref, delta_ref,
  dq_ref, dk_ref, dv_ref, *, tile, group, scale, interpret,
):  # fmt: skip
  # first, last [B L]; q, do, dq [B L H d]; k, v, dk, dv [B L Hk d]; sums, delta [B H L]
  n, hk, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  own, d = tile.own, q_ref.shape[-1]
  rows = pl.ds(n * own, own)
  scale_2 = scale * math.log2(math.e)
  dot = functools.partial(_dot, interpret=interpret)
  dtype = q_ref.dtype
  zeros = jnp.zeros((own, d), F32)

  K, V = k_ref[b, rows, hk, :], v_ref[b, rows, hk, :]

  def of_keys(head, queries, see, carry):
    dK, dV = carry
    h = hk * group + head
    Q, dO = q_ref[b, queries, h, :], do_ref[b, queries, h, :]
    # Keys by queries: the products with P and dS then need no transpose of what is in registers.
    P = jnp.exp2(dot(K, Q, NT) * scale_2 - sums_ref[b, h, queries][None, :])
    P = P if see is None else jnp.where(see, P, 0.0)
    dV += dot(P.astype(dtype), dO, NN)
    dS = P * (dot(V, dO, NT) - delta_ref[b, h, queries][None, :])
    return dK + dot(dS.astype(dtype), Q, NN), dV

  dK, dV = _over_queries(last_ref, b, n, group, tile, of_keys, (zeros, zeros))
  dk_ref[b, rows, hk, :] = (dK * scale).astype(dtype)
  dv_ref[b, rows, hk, :] = dV.astype(dtype)

  def of_head(head, _):
    h = hk * group + head
    Q, dO = q_ref[b, rows, h, :], do_ref[b, rows, h, :]
    sums, delta = sums_ref[b, h, rows][:, None], delta_ref[b, h, rows][:, None]

    def of_queries(keys, see, dQ):
      K, V = k_ref[b, keys, hk, :], v_ref[b, keys, hk, :]
      P = jnp.exp2(dot(Q, K, NT) * scale_2 - sums)
      P = P if see is None else jnp.where(see, P, 0.0)
      dS = P * (dot(dO, V, NT) - delta)
      return dQ + dot(dS.astype(dtype), K, NN)

    dQ = _over_keys(first_ref, b, n, tile, of_queries, zeros)
    dq_ref[b, rows, h, :] = (dQ * scale).astype(dtype)

  lax.fori_loop(jnp.int32(0), jnp.int32(group), of_head, None)


def _call(body, name, args, out_shape, grid, tile, interpret, **options):
  body = functools.partial(body, tile=tile, interpret=interpret, **options)
  how = dict(grid=grid, warps=tile.warps, stages=tile.stages, interpret=interpret)
  return call(body, name, args, out_shape, **how)


def forward(q, k, v, first, *, tile, save, scale, interpret):
  """o [B L H d] and, to save it, log2 of each softmax's sum [B H L].

  Args:
    q: [B L H d]; k, v: [B L Hk d]; L is whole blocks and d a power of two of at least 16.
    first: [B L] int32, the first key that a query sees; never falls.
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


def backward(q, k, v, first, last, o, sums, do, *, tile, scale, interpret):
  """dq, dk, dv, of arguments and results of `forward`; last: [B L], a key's last query."""
  B, L, H, _ = q.shape
  Hk = k.shape[2]
  delta = jnp.sum(o.astype(F32) * do.astype(F32), axis=3).swapaxes(1, 2)
  return _call(
    _backward_body,
    "attention_bwd",
    (first, last, q, k, v, do, sums, delta),
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
    (L // tile.own, Hk, B),
    tile,
    interpret,
    group=H // Hk,
    scale=scale,
  )
