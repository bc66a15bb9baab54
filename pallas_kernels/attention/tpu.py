"""Causal attention on TPU: heads side by side in lanes, and rows that fit into VMEM."""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import tpu_kernels
from pallas_kernels.attention.checks import check_inputs
from pallas_kernels.attention.mask_ranges import first_keys
from pallas_kernels.attention.vjp import attend
from pallas_kernels.common.platform import only_on
from pallas_kernels.common.tiling import LANES, pad_axis, round_up

F32 = jnp.float32
# Tokens of a block: larger ones have fewer and longer loops, smaller ones skip more.
_BLOCKS = (512, 256, 128)
# Tokens whose keys or queries of 128 lanes one kernel keeps in VMEM. Longer rows are taken in pairs
# of spans.
SPAN = 8192


def choose_block(length: int, heads: int = 1) -> int:
  """The largest block that pads `length` by no more than an eighth over the least.

  Where a tile holds many heads it is smaller: their code is unrolled, and takes long to compile.
  """
  least = round_up(length, LANES)
  fits = lambda n: n == LANES or (n * heads <= 1024 and round_up(length, n) * 8 <= least * 9)
  return next(filter(fits, _BLOCKS))


class _Lanes(NamedTuple):
  """How heads [H d] lie in lanes: whole tiles of heads of a power of two, or one small tile."""

  heads: int  # with those of zeros that fill the last tile
  size: int
  per_tile: int

  @classmethod
  def of(cls, H, d):
    size = max(8, 1 << (d - 1).bit_length()) if d < LANES else round_up(d, LANES)
    per_tile = min(max(LANES // size, 1), H)
    return cls(round_up(H, per_tile), size, per_tile)

  def lay(self, x, length):
    """[B L H d] as [B length lanes]."""
    x = pad_axis(pad_axis(pad_axis(x, 1, length), 2, self.heads), 3, self.size)
    return x.reshape(*x.shape[:2], -1)

  def take(self, x, shape):
    """Back to [B L H d] of this shape."""
    B, L, H, d = shape
    return x.reshape(B, -1, self.heads, self.size)[:, :L, :H, :d]


def _merge(parts, lanes, dtype):
  """Attention to several spans of keys, from that to each: (o, log2 of the softmax's sum)."""
  o, sums = zip(*parts)
  if len(parts) == 1:
    return o[0].astype(dtype), sums[0]
  most = jnp.stack(sums).max(0)
  shares = [jnp.exp2(x - most) for x in sums]
  total = sum(shares)

  def of_lanes(x):  # [B tiles per_tile L] -> [B L lanes]
    x = jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1)
    return jnp.repeat(x, lanes.size, axis=2)

  mixed = sum(x * of_lanes(share / total) for x, share in zip(o, shares))
  return mixed.astype(dtype), most + jnp.log2(total)


def attention_tpu(q, k, v, segments=None, *, window=None, interpret=False):
  """softmax(q k^T / sqrt(d)) v over the tokens of the same segment up to the current one.

  Args:
    q: [B, L, H, d] bfloat16; k, v: [B, L, Hk, d], Hk a divisor of H.
    segments: [B, L] int32, ascending, or None.
    window: how many keys a token sees, its own included; None is all.
  """
  check_inputs("pallas_tpu", q, k, v)
  L, H, d = q.shape[1:]
  group = H // k.shape[2]
  lanes = _Lanes.of(H, d)
  block = choose_block(L, lanes.per_tile)
  Lp = round_up(L, block)
  span = max(SPAN * LANES // max(lanes.per_tile * lanes.size, LANES), block)
  starts = range(0, Lp, span)
  of = lambda x, start, axis: lax.slice_in_dim(x, start, min(start + span, Lp), axis=axis)

  def pairs():
    """Spans of queries and of keys that some of them see, by where they start."""
    for a, b in itertools.product(starts, starts):
      if b <= a and (window is None or b + span > a - (window - 1)):
        yield a, b

  def options(a, b, dtype):
    tile = tpu_kernels.Tile(lanes.per_tile, lanes.size, block, d**-0.5, a == b, interpret)
    return dict(tile=tile, dtype=dtype if len(starts) == 1 else F32)

  def inputs(q, k, v, segments):
    # Padded tokens come last: no query that counts sees them.
    k, v = (jnp.repeat(x, group, axis=2) if group > 1 else x for x in (k, v))
    first = first_keys(segments, q.shape[0], Lp, window)
    return [lanes.lay(x, Lp) for x in (q, k, v)], first

  def forward(*args, save):
    (q, k, v), first = inputs(*args)
    found = []
    for a in starts:
      parts = [
        tpu_kernels.forward(
          *(of(x, at, 1) for x, at in ((q, a), (k, b), (v, b))),
          of(first, a, 1) - b,
          save=save or len(starts) > 1,
          **options(a, b, q.dtype),
        )
        for x, b in pairs()
        if x == a
      ]
      found.append(_merge(parts, lanes, q.dtype))
    o, sums = zip(*found)
    sums = jnp.concatenate(sums, axis=3) if save else None
    return lanes.take(jnp.concatenate(o, axis=1), args[0].shape), sums

  def backward(q, k, v, segments, o, sums, do):
    (qs, ks, vs), first = inputs(q, k, v, segments)
    o, do = lanes.lay(o, Lp), lanes.lay(do, Lp)
    found = {}
    for a, b in pairs():
      grads = tpu_kernels.backward(
        *(of(x, at, 1) for x, at in ((qs, a), (ks, b), (vs, b))),
        of(first, a, 1) - b,
        of(o, a, 1),
        of(sums, a, 3),
        of(do, a, 1),
        **options(a, b, q.dtype),
      )
      for name, start, x in zip("qkv", (a, b, b), grads):
        found[name, start] = found[name, start] + x if (name, start) in found else x
    dq, dk, dv = (jnp.concatenate([found[name, x] for x in starts], axis=1) for name in "qkv")

    def own(x):
      x = lanes.take(x, q.shape)
      if group > 1:
        x = x.astype(F32).reshape(*x.shape[:2], H // group, group, d).sum(3)
      return x.astype(q.dtype)

    return lanes.take(dq, q.shape).astype(q.dtype), own(dk), own(dv)

  q = q if interpret else only_on(q, "tpu", "attention_tpu")
  return attend(forward, backward, q, k, v, segments, window)
