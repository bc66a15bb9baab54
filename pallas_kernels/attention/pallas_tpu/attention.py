"""Causal attention on TPU: packs heads into lane tiles and splits sequences that exceed VMEM."""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.checks import check_inputs
from pallas_kernels.attention.mask_ranges import first_keys
from pallas_kernels.attention.pallas_tpu import kernels
from pallas_kernels.attention.vjp import differentiable_attention
from pallas_kernels.common.platform import require_platform
from pallas_kernels.common.tiling import LANES, pad_axis, round_up

F32 = jnp.float32
# Tokens per block. Larger blocks have less loop overhead, smaller blocks skip more.
_BLOCKS = (512, 256, 128)
# Tokens whose keys or queries (128 lanes) one kernel holds in VMEM. Longer sequences are split into
# spans, with one kernel call per pair of query and key spans.
SPAN = 8192


def choose_block(length: int, heads: int = 1) -> int:
  """Return the largest block size that pads `length` by at most 1/8 more than blocks of 128.

  With many heads per lane tile it is smaller, because their code is unrolled and slow to compile.
  """
  least = round_up(length, LANES)
  fits = lambda n: n == LANES or (n * heads <= 1024 and round_up(length, n) * 8 <= least * 9)
  return next(filter(fits, _BLOCKS))


class _LaneLayout(NamedTuple):
  """Layout of heads [H d] in lane tiles: padded head sizes that divide or are multiples of 128."""

  heads: int  # including zero heads that fill the last tile
  size: int  # padded head size
  per_tile: int  # heads per lane tile

  @classmethod
  def of(cls, H, d):
    size = max(8, 1 << (d - 1).bit_length()) if d < LANES else round_up(d, LANES)
    per_tile = min(max(LANES // size, 1), H)
    return cls(round_up(H, per_tile), size, per_tile)

  def pack(self, x, length):
    """Pad and reshape [B L H d] to [B length lanes]."""
    x = pad_axis(pad_axis(pad_axis(x, 1, length), 2, self.heads), 3, self.size)
    return x.reshape(*x.shape[:2], -1)

  def unpack(self, x, shape):
    """Reshape and slice [B length lanes] to `shape`, [B L H d]."""
    B, L, H, d = shape
    return x.reshape(B, -1, self.heads, self.size)[:, :L, :H, :d]


def _merge(parts, lanes, dtype):
  """Combine attention over several key spans; parts and result are (o, log2-sum-exp)."""
  o, lse = zip(*parts)
  if len(parts) == 1:
    return o[0].astype(dtype), lse[0]
  largest = jnp.stack(lse).max(0)
  weights = [jnp.exp2(x - largest) for x in lse]
  total = sum(weights)

  def of_lanes(x):  # [B tiles per_tile L] -> [B L lanes]
    x = jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1)
    return jnp.repeat(x, lanes.size, axis=2)

  mixed = sum(x * of_lanes(weight / total) for x, weight in zip(o, weights))
  return mixed.astype(dtype), largest + jnp.log2(total)


def attention_tpu(q, k, v, segments=None, *, window=None, interpret=False):
  """Return softmax(q k^T / sqrt(d)) v over earlier tokens of the same segment.

  Args:
    q: [B, L, H, d] bfloat16.
    k, v: [B, L, Hk, d], Hk a divisor of H.
    segments: [B, L] int32, ascending, or None.
    window: number of keys that a token attends to, itself included; None for all.
  """
  check_inputs("pallas_tpu", q, k, v)
  L, H, d = q.shape[1:]
  group = H // k.shape[2]
  lanes = _LaneLayout.of(H, d)
  block = choose_block(L, lanes.per_tile)
  Lp = round_up(L, block)
  span = max(SPAN * LANES // max(lanes.per_tile * lanes.size, LANES), block)
  starts = range(0, Lp, span)
  span_of = lambda x, start, axis: lax.slice_in_dim(x, start, min(start + span, Lp), axis=axis)

  def pairs():
    """Yield the starts of each query span and of each key span that it attends to."""
    for a, b in itertools.product(starts, starts):
      if b <= a and (window is None or b + span > a - (window - 1)):
        yield a, b

  def options(a, b, dtype):
    tile = kernels.AttentionTileTPU(lanes.per_tile, lanes.size, block, d**-0.5, a == b, interpret)
    return dict(tile=tile, dtype=dtype if len(starts) == 1 else F32)

  def inputs(q, k, v, segments):
    # Padded tokens come last: no real query attends to them.
    k, v = (jnp.repeat(x, group, axis=2) if group > 1 else x for x in (k, v))
    first = first_keys(segments, q.shape[0], Lp, window)
    return [lanes.pack(x, Lp) for x in (q, k, v)], first

  def forward(*args, save):
    (q, k, v), first = inputs(*args)
    results = []
    for a in starts:
      parts = [
        kernels.forward(
          *(span_of(x, start, 1) for x, start in ((q, a), (k, b), (v, b))),
          span_of(first, a, 1) - b,
          save=save or len(starts) > 1,
          **options(a, b, q.dtype),
        )
        for x, b in pairs()
        if x == a
      ]
      results.append(_merge(parts, lanes, q.dtype))
    o, logsumexp = zip(*results)
    logsumexp = jnp.concatenate(logsumexp, axis=3) if save else None
    return lanes.unpack(jnp.concatenate(o, axis=1), args[0].shape), logsumexp

  def backward(q, k, v, segments, o, logsumexp, do):
    (qs, ks, vs), first = inputs(q, k, v, segments)
    o, do = lanes.pack(o, Lp), lanes.pack(do, Lp)
    sums = {}  # ("q", "k" or "v", start of the span) -> gradient
    for a, b in pairs():
      grads = kernels.backward(
        *(span_of(x, start, 1) for x, start in ((qs, a), (ks, b), (vs, b))),
        span_of(first, a, 1) - b,
        span_of(o, a, 1),
        span_of(logsumexp, a, 3),
        span_of(do, a, 1),
        **options(a, b, q.dtype),
      )
      for name, start, x in zip("qkv", (a, b, b), grads):
        sums[name, start] = sums[name, start] + x if (name, start) in sums else x
    dq, dk, dv = (jnp.concatenate([sums[name, x] for x in starts], axis=1) for name in "qkv")

    def sum_groups(x):
      x = lanes.unpack(x, q.shape)
      if group > 1:
        x = x.astype(F32).reshape(*x.shape[:2], H // group, group, d).sum(3)
      return x.astype(q.dtype)

    return lanes.unpack(dq, q.shape).astype(q.dtype), sum_groups(dk), sum_groups(dv)

  q = q if interpret else require_platform(q, "tpu", "attention_tpu")
  return differentiable_attention(forward, backward, q, k, v, segments, window)
