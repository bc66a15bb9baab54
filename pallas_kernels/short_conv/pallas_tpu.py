"""Short convolution with epilogue on TPU: each token is read once, plus the edges of its block.

Grid (batch, channels, tokens). The backward pass recomputes the convolution and accumulates the
gradient of the taps in VMEM over the tokens of a sequence.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.tiling import LANES, SUBLANES, TPU_VMEM_LIMIT, pad_axis, round_up

F32 = jnp.float32
TOKENS, CHANNELS = 256, 512  # upper limits per block
EDGE = 16  # tokens read from each neighbouring block: one bfloat16 tile


def _columns(rows):
  """Concatenate [1, T] rows and transpose the result to one column."""
  row = jnp.concatenate(rows, axis=1)
  return jnp.broadcast_to(row, (SUBLANES, row.shape[1])).T[:, :1]


def _group(size, channels):
  """Return the lanes processed at a time: one head, or as many heads as fill a register."""
  return LANES if LANES % size == 0 and channels % LANES == 0 else size


def _total(size):
  """Return a function that sums every `size` lanes of x [T, lanes], broadcast to these lanes."""

  def total(x):
    lanes = x.shape[1]
    if lanes == size:
      return jnp.sum(x, axis=1, keepdims=True)
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    head = lax.div(lane, lax.full_like(lane, size))
    sums = 0.0
    for i in range(lanes // size):
      own = jnp.sum(jnp.where(head == i, x, 0.0), axis=1, keepdims=True)
      sums = jnp.where(head == i, own, sums)
    return sums

  return total


def _mask_segment(positions, s, x):
  """Return x_t where tokens t and t - s are in the same segment, else 0."""
  return x if positions is None or s == 0 else jnp.where(positions >= s, x, 0.0)


def _forward_body(x_ref, before_ref, taps_ref, *refs, epilogue, size, width):
  # x, y [T, C]; before [EDGE, C]; taps [width or width + 1, C]; positions? [1, T]
  *position_refs, y_ref = refs
  T, C = x_ref.shape
  positions = _columns([ref[...] for ref in position_refs]) if position_refs else None
  first = pl.program_id(2) == 0
  group = _group(size, C)
  for i in range(0, C, group):
    at = slice(i, i + group)
    before = jnp.where(first, 0.0, before_ref[:, at].astype(F32))
    window = jnp.concatenate([before, x_ref[:, at].astype(F32)], axis=0)
    y = taps_ref[width:, at] if taps_ref.shape[0] > width else 0.0
    for s in range(width):
      shifted = _mask_segment(positions, s, window[EDGE - s : EDGE - s + T])
      y += shifted * taps_ref[s : s + 1, at]
    y_ref[:, at] = epilogue(y, _total(size)).astype(y_ref.dtype)


def _backward_body(
  x_ref, before_ref, after_ref, d_ref, d_after_ref, taps_ref, *refs, epilogue, size, width
):
  # x, d, dx [T, C]; before, after, d_after [EDGE, C]; taps, dtaps [.., C];
  # positions? [1, T], [1, LANES]
  *position_refs, dx_ref, dtaps_ref = refs
  T, C = x_ref.shape
  rows = T + EDGE  # the block and the edge after it, whose outputs depend on the block
  positions = _columns([ref[...] for ref in position_refs])[:rows] if position_refs else None
  n = pl.program_id(2)
  first, last = n == 0, n == pl.num_programs(2) - 1

  @pl.when(first)
  def _():
    dtaps_ref[...] = jnp.zeros_like(dtaps_ref)

  group = _group(size, C)
  for i in range(0, C, group):
    at = slice(i, i + group)
    edge = lambda ref, outside: jnp.where(outside, 0.0, ref[:, at].astype(F32))
    block = lambda ref: ref[:, at].astype(F32)
    window = jnp.concatenate([edge(before_ref, first), block(x_ref), edge(after_ref, last)], axis=0)
    d = jnp.concatenate([block(d_ref), edge(d_after_ref, last)], axis=0)
    shifted = [
      _mask_segment(positions, s, window[EDGE - s : EDGE - s + rows]) for s in range(width)
    ]
    taps = [taps_ref[s : s + 1, at] for s in range(taps_ref.shape[0])]
    y = sum((x * tap for x, tap in zip(shifted, taps)), start=sum(taps[width:]))
    (dy,) = jax.vjp(lambda y: epilogue(y, _total(size)), y)[1](d)
    dx = sum(_mask_segment(positions, s, dy)[s : s + T] * taps[s] for s in range(width))
    dx_ref[:, at] = dx.astype(dx_ref.dtype)
    terms = [dy[:T] * x[:T] for x in shifted] + [dy[:T]] * (len(taps) - width)
    dtaps = [jnp.sum(x, axis=0, keepdims=True) for x in terms]
    dtaps_ref[:, at] += jnp.concatenate(dtaps, axis=0)


class _ConvTile:
  """Blocks of x [B, L, D]: T tokens and C channels, a multiple of the head size."""

  def __init__(self, x, size):
    B, L, D = x.shape
    self.T = min(TOKENS, round_up(L, LANES))
    wanted = [c for c in range(size, D + 1, size) if (D % c == 0 and c % LANES == 0) or c == D]
    self.C = max([c for c in wanted if c <= CHANNELS], default=wanted[0])
    self.L = round_up(L, self.T)
    self.grid = (B, D // self.C, self.L // self.T)

  def specs(self, taps):
    T, C, last = self.T, self.C, self.grid[2]
    per_edge, per_row = T // EDGE, T // LANES
    block = lambda rows, at: pl.BlockSpec((None, rows, C), lambda b, c, n: (b, at(n), c))
    positions = lambda columns, at: pl.BlockSpec((None, 1, columns), lambda b, c, n: (b, 0, at(n)))
    # Clamped at the ends of a sequence, where the bodies use zeros.
    after = lambda per: lambda n: lax.min(lax.mul(n + 1, jnp.int32(per)), jnp.int32(last * per - 1))
    return dict(
      block=block(T, lambda n: n),
      before=block(EDGE, lambda n: lax.max(lax.mul(n, jnp.int32(per_edge)) - 1, jnp.int32(0))),
      after=block(EDGE, after(per_edge)),
      taps=pl.BlockSpec((None, taps, C), lambda b, c, n: (b, 0, c)),
      positions=positions(T, lambda n: n),
      positions_after=positions(LANES, after(per_row)),
    )


def _call(body, name, tile, in_specs, args, out_specs, out_shape, interpret):
  return pl.pallas_call(
    body,
    grid=tile.grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=TPU_VMEM_LIMIT
    ),
    interpret=interpret,
    name=name,
  )(*args)


def _positions(positions, tile):
  return [] if positions is None else [pad_axis(positions, 1, tile.L)[:, None]]


def forward(x, taps, positions, *, epilogue, size, width, interpret):
  """Return epilogue(sum_s taps_s x_{t-s} + bias) for every `size` channels of x, in x's dtype.

  Args:
    x: [B, L, D].
    taps: [B, width (+ 1), D] float32, the current token's first; the additional one is the bias.
    positions: [B, L] int32, of each token in its segment, or None.
    epilogue: (float32 y [tokens, channels], function that sums every `size` channels) -> z.
  """
  tile = _ConvTile(x, size)
  spec, positions = tile.specs(taps.shape[1]), _positions(positions, tile)
  padded = pad_axis(x, 1, tile.L)
  y = _call(
    functools.partial(_forward_body, epilogue=epilogue, size=size, width=width),
    "short_conv_fwd",
    tile,
    [spec["block"], spec["before"], spec["taps"], *[spec["positions"] for _ in positions]],
    [padded, padded, taps, *positions],
    spec["block"],
    jax.ShapeDtypeStruct(padded.shape, x.dtype),
    interpret,
  )
  return y[:, : x.shape[1]]


def backward(x, taps, positions, d, *, epilogue, size, width, interpret):
  """Return dx in x's dtype and dtaps [B, width (+ 1), D] float32."""
  tile = _ConvTile(x, size)
  spec, positions = tile.specs(taps.shape[1]), _positions(positions, tile)
  padded, d = (pad_axis(y, 1, tile.L) for y in (x, d))
  names = ["block", "before", "after", "block", "after", "taps"]
  names += ["positions", "positions_after"] if positions else []
  dx, dtaps = _call(
    functools.partial(_backward_body, epilogue=epilogue, size=size, width=width),
    "short_conv_bwd",
    tile,
    [spec[name] for name in names],
    [padded, padded, padded, d, d, taps, *positions * 2],
    [spec["block"], spec["taps"]],
    [jax.ShapeDtypeStruct(padded.shape, x.dtype), jax.ShapeDtypeStruct(taps.shape, F32)],
    interpret,
  )
  return dx[:, : x.shape[1]], dtaps
