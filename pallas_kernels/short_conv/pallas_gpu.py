"""Short convolutions with epilogue on NVIDIA GPUs: one program per block of tokens of one head.

x may consist of several parts, e.g. q, k and v from one projection; each part has its own output.
A program splits its tokens into several runs and steps through all runs in parallel, one token of
each per step, with the last width - 1 tokens in registers. A token is therefore loaded once; the
backward pass recomputes width - 1 tokens after the end of a run for the gradients of its last ones.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.common.gpu import launch
from pallas_kernels.common.tiling import cdiv

F32 = jnp.float32
ELEMENTS = 512  # elements per step: one token of each run
TOKENS = 256  # tokens per program, which writes one partial sum of dtaps


class Part(NamedTuple):
  """Consecutive channels of x with one head size and one epilogue."""

  epilogue: Callable  # (y, total) -> z, float32 y [tokens, size]; total(x) sums over channels
  size: int  # head size, a power of two
  channels: int


def _total(x):
  return jnp.sum(x, axis=1, keepdims=True)


class _HeadIndex(NamedTuple):
  """Which tokens, batch element and head a program handles."""

  n: jax.Array  # token block
  b: jax.Array  # batch element
  x_offset: jax.Array  # first channel of the head in x
  part_offset: jax.Array  # first channel of the head in its part


def _run_for_own_part(parts, run):
  """Call run(i, head_index) for the part i that this program's head belongs to."""
  # Read here: the interpreter does not support program_id inside branches.
  n, unit, b = (pl.program_id(axis) for axis in range(3))
  heads, channels = 0, 0
  for i, part in enumerate(parts):
    first, heads = heads, heads + part.channels // part.size
    offset = (unit - first) * part.size
    own = functools.partial(run, i, _HeadIndex(n, b, channels + offset, offset))
    if len(parts) == 1:
      own()
    else:
      pl.when((unit >= first) & (unit < heads))(own)
    channels += part.channels


class _Head:
  """Loads, stores and convolution of one head: runs of `steps` tokens of x [B, L, ..]."""

  def __init__(self, index, size, tokens, taps_ref, position_refs, width):
    rows = min(ELEMENTS // size, tokens)
    self.shape, self.steps = (rows, size), tokens // rows
    self._index, self._positions, self.width = index, position_refs, width
    self._first = index.n * tokens + self.steps * lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    self._channels = lax.broadcasted_iota(jnp.int32, (1, size), 1)
    self.cols = pl.ds(index.x_offset, size)
    self.taps = [taps_ref[index.b, s, self.cols][None] for s in range(taps_ref.shape[1])]

  def _address(self, ref, t, in_x):
    at = self._first + t
    inside = jnp.broadcast_to((at >= 0) & (at < ref.shape[1]), self.shape)
    start = self._index.x_offset if in_x else self._index.part_offset
    return ref.at[self._index.b, at, start + self._channels], inside

  def load(self, ref, t, in_x=True):
    """Load token t of every run as float32; zeros outside the sequence."""
    at, inside = self._address(ref, t, in_x)
    return pltriton.load(at, mask=inside, other=0.0).astype(F32)

  def store(self, ref, t, x, in_x=True):
    """Store token t of every run; tokens after the end of a run are masked (another run's)."""
    at, inside = self._address(ref, t, in_x)
    pltriton.store(at, x.astype(ref.dtype), mask=inside & (t < self.steps))

  def segment_mask(self, t):
    """Return (s, x) -> x where tokens t and t - s are in the same segment, else 0."""
    if not self._positions:
      return lambda s, x: x
    (positions,) = self._positions
    at = jnp.clip(self._first[:, 0] + t, 0, positions.shape[1] - 1)
    age = positions[self._index.b, at][:, None]
    return lambda s, x: x if s == 0 else jnp.where(age >= s, x, 0.0)

  def conv(self, window):
    """Convolve the last `width` tokens, the current one first, and add the bias."""
    y = sum(x * tap for x, tap in zip(window, self.taps))
    return sum(self.taps[self.width :], start=y)


def _forward_body(x_ref, taps_ref, *refs, parts, tokens, width):
  y_refs, position_refs = refs[-len(parts) :], refs[: -len(parts)]

  def run(number, index):
    epilogue, size, _ = parts[number]
    own = _Head(index, size, tokens, taps_ref, position_refs, width)

    def step(t, before):
      window, same = [own.load(x_ref, t), *before], own.segment_mask(t)
      y = own.conv([same(s, x) for s, x in enumerate(window)])
      own.store(y_refs[number], t, epilogue(y, _total), in_x=False)
      return window[:-1]

    lax.fori_loop(0, own.steps, step, [own.load(x_ref, -s) for s in range(1, width)])

  _run_for_own_part(parts, run)


def _backward_body(x_ref, taps_ref, *refs, parts, tokens, width):
  d_refs, (*position_refs, dx_ref, dtaps_ref) = refs[: len(parts)], refs[len(parts) :]

  def run(number, index):
    epilogue, size, _ = parts[number]
    own = _Head(index, size, tokens, taps_ref, position_refs, width)
    # Start at the last token whose output depends on the run.
    last = own.steps + width - 2

    def step(i, carry):
      # x of token t and earlier; contributions of later tokens to dx of earlier ones; dtaps.
      later, partial, dtaps = carry
      t = last - i
      window, same = [*later, own.load(x_ref, t - width + 1)], own.segment_mask(t)
      masked = [same(s, x) for s, x in enumerate(window)]
      d = own.load(d_refs[number], t, in_x=False)
      (dy,) = jax.vjp(lambda y: epilogue(y, _total), own.conv(masked))[1](d)
      dx = [y + same(s, dy) * own.taps[s] for s, y in enumerate([*partial, 0.0])]
      own.store(dx_ref, t, dx[0])
      dy = jnp.where(t < own.steps, dy, 0.0)
      masked += [1.0] * (len(dtaps) - width)
      return window[1:], dx[1:], [total + dy * x for total, x in zip(dtaps, masked)]

    zero = jnp.zeros(own.shape, F32)
    later = [own.load(x_ref, last - s) for s in range(width - 1)]
    carry = later, [zero] * (width - 1), [zero] * len(own.taps)
    _, _, dtaps = lax.fori_loop(0, last + 1, step, carry)
    for s, total in enumerate(dtaps):
      dtaps_ref[index.b, index.n, s, own.cols] = jnp.sum(total, axis=0)

  _run_for_own_part(parts, run)


def _call(body, name, x, args, out_shape, *, parts, width, interpret):
  B, L, _ = x.shape
  tokens = min(TOKENS, pl.next_power_of_2(L))
  blocks, heads = cdiv(L, tokens), sum(part.channels // part.size for part in parts)
  # A thread holds 8 elements of each token in registers, fewer with more than four taps.
  warps = 2 * cdiv(pl.next_power_of_2(width), 4)
  body = functools.partial(body, parts=parts, tokens=tokens, width=width)
  options = dict(grid=(blocks, heads, B), warps=warps, interpret=interpret)
  return launch(body, name, args, out_shape(blocks), **options)


def forward(x, taps, positions, *, parts, width, interpret):
  """Return epilogue(sum_s taps_s x_{t-s} + bias) of every head, [B, L, channels] for each part.

  Args:
    x: [B, L, ..], the channels of the parts, then channels that are not read.
    taps: [B, width (+ 1), channels of all parts] float32, the current token's first; the additional
      one is the bias.
    positions: [B, L] int32, of each token in its segment, or None.
  """
  out_shape = lambda _: [
    jax.ShapeDtypeStruct((*x.shape[:2], part.channels), x.dtype) for part in parts
  ]
  options = dict(parts=parts, width=width, interpret=interpret)
  return _call(_forward_body, "short_conv_fwd", x, (x, taps, positions), out_shape, **options)


def backward(x, taps, positions, ds, *, parts, width, interpret):
  """Return dx in x's dtype, undefined for channels outside the parts, and dtaps like taps."""
  out_shape = lambda blocks: [
    jax.ShapeDtypeStruct(x.shape, x.dtype),
    jax.ShapeDtypeStruct((x.shape[0], blocks, *taps.shape[1:]), F32),
  ]
  args, options = (x, taps, *ds, positions), dict(parts=parts, width=width, interpret=interpret)
  dx, dtaps = _call(_backward_body, "short_conv_bwd", x, args, out_shape, **options)
  return dx, dtaps.sum(axis=1)
