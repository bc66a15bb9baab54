"""Short convolutions on NVIDIA GPUs: a program takes some tokens of one head.

Heads may be of several parts of x, as q, k and v are of one product: each part has an output of its
own. A program goes through several stretches of tokens at the same time, one token of each after
the other, and keeps what the next tokens need of the last ones: a token is read and computed once,
and again only after the end of a stretch, for the gradients of its last tokens.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.common.gpu import call
from pallas_kernels.common.tiling import cdiv

F32 = jnp.float32
ELEMENTS = 512  # of a block, one token of each stretch
TOKENS = 256  # of a program, which writes its sums of the gradient of the taps


class Part(NamedTuple):
  """Channels of x that are heads of one size, and what follows their convolution."""

  epilogue: Callable  # (y, total) -> z, of float32 y [tokens, size] and the sum of the channels
  size: int  # a power of two
  channels: int


def _total(x):
  return jnp.sum(x, axis=1, keepdims=True)


class _Place(NamedTuple):
  """A program's tokens, the row, and where its head begins in x and in its part."""

  n: jax.Array
  b: jax.Array
  in_x: jax.Array
  in_part: jax.Array


def _of_its_part(parts, run):
  """run(i, place) where i is the number of this program's part."""
  # Asked for here, as the interpreter knows them outside of branches alone.
  n, unit, b = (pl.program_id(axis) for axis in range(3))
  heads, channels = 0, 0
  for i, part in enumerate(parts):
    first, heads = heads, heads + part.channels // part.size
    in_part = (unit - first) * part.size
    mine = functools.partial(run, i, _Place(n, b, channels + in_part, in_part))
    if len(parts) == 1:
      mine()
    else:
      pl.when((unit >= first) & (unit < heads))(mine)
    channels += part.channels


class _Head:
  """Stretches of `steps` tokens of one head, of x [B, L, ..] and of an array of its part."""

  def __init__(self, place, size, tokens, taps_ref, ages_refs, width):
    rows = min(ELEMENTS // size, tokens)
    self.shape, self.steps = (rows, size), tokens // rows
    self._place, self._ages, self.width = place, ages_refs, width
    self._first = place.n * tokens + self.steps * lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    self._channels = lax.broadcasted_iota(jnp.int32, (1, size), 1)
    self.cols = pl.ds(place.in_x, size)
    self.taps = [taps_ref[place.b, s, self.cols][None] for s in range(taps_ref.shape[1])]

  def _at(self, ref, t, in_x):
    at = self._first + t
    inside = jnp.broadcast_to((at >= 0) & (at < ref.shape[1]), self.shape)
    start = self._place.in_x if in_x else self._place.in_part
    return ref.at[self._place.b, at, start + self._channels], inside

  def load(self, ref, t, in_x=True):
    """Token t of every stretch; zeros outside the row."""
    at, inside = self._at(ref, t, in_x)
    return pltriton.load(at, mask=inside, other=0.0).astype(F32)

  def store(self, ref, t, x, in_x=True):
    """Tokens after a stretch are left out: another one has them."""
    at, inside = self._at(ref, t, in_x)
    pltriton.store(at, x.astype(ref.dtype), mask=inside & (t < self.steps))

  def of_document(self, t):
    """(s, x) -> x where the token s before t is of t's segment, else 0."""
    if not self._ages:
      return lambda s, x: x
    (ages,) = self._ages
    at = jnp.clip(self._first[:, 0] + t, 0, ages.shape[1] - 1)
    age = ages[self._place.b, at][:, None]
    return lambda s, x: x if s == 0 else jnp.where(age >= s, x, 0.0)

  def conv(self, seen):
    """Of the tokens seen, the current one first."""
    y = sum(x * tap for x, tap in zip(seen, self.taps))
    return sum(self.taps[self.width :], start=y)


def _forward_body(x_ref, taps_ref, *refs, parts, tokens, width):
  y_refs, ages_refs = refs[-len(parts) :], refs[: -len(parts)]

  def run(number, place):
    epilogue, size, _ = parts[number]
    own = _Head(place, size, tokens, taps_ref, ages_refs, width)

    def step(t, before):
      window, same = [own.load(x_ref, t), *before], own.of_document(t)
      y = own.conv([same(s, x) for s, x in enumerate(window)])
      own.store(y_refs[number], t, epilogue(y, _total), in_x=False)
      return window[:-1]

    lax.fori_loop(0, own.steps, step, [own.load(x_ref, -s) for s in range(1, width)])

  _of_its_part(parts, run)


def _backward_body(x_ref, taps_ref, *refs, parts, tokens, width):
  d_refs, (*ages_refs, dx_ref, dtaps_ref) = refs[: len(parts)], refs[len(parts) :]

  def run(number, place):
    epilogue, size, _ = parts[number]
    own = _Head(place, size, tokens, taps_ref, ages_refs, width)
    # From the last token that sees one of the stretch.
    last = own.steps + width - 2

    def step(i, carry):
      # x of t and of tokens before it; what dx of tokens before t has from those after it.
      later, partial, dtaps = carry
      t = last - i
      window, same = [*later, own.load(x_ref, t - width + 1)], own.of_document(t)
      seen = [same(s, x) for s, x in enumerate(window)]
      d = own.load(d_refs[number], t, in_x=False)
      (dy,) = jax.vjp(lambda y: epilogue(y, _total), own.conv(seen))[1](d)
      dx = [y + same(s, dy) * own.taps[s] for s, y in enumerate([*partial, 0.0])]
      own.store(dx_ref, t, dx[0])
      dy = jnp.where(t < own.steps, dy, 0.0)
      seen += [1.0] * (len(dtaps) - width)
      return window[1:], dx[1:], [total + dy * x for total, x in zip(dtaps, seen)]

    zero = jnp.zeros(own.shape, F32)
    later = [own.load(x_ref, last - s) for s in range(width - 1)]
    carry = later, [zero] * (width - 1), [zero] * len(own.taps)
    _, _, dtaps = lax.fori_loop(0, last + 1, step, carry)
    for s, total in enumerate(dtaps):
      dtaps_ref[place.b, place.n, s, own.cols] = jnp.sum(total, axis=0)

  _of_its_part(parts, run)


def _call(body, name, x, args, out_shape, *, parts, width, interpret):
  B, L, _ = x.shape
  tokens = min(TOKENS, pl.next_power_of_2(L))
  blocks, heads = cdiv(L, tokens), sum(part.channels // part.size for part in parts)
  # A thread has 8 numbers of each block that is kept, fewer where there are more than four taps.
  warps = 2 * cdiv(pl.next_power_of_2(width), 4)
  body = functools.partial(body, parts=parts, tokens=tokens, width=width)
  how = dict(grid=(blocks, heads, B), warps=warps, interpret=interpret)
  return call(body, name, args, out_shape(blocks), **how)


def forward(x, taps, ages, *, parts, width, interpret):
  """epilogue(sum_s taps_s x_{t-s} + bias) of every head, an array [B, L, channels] for each part.

  Args:
    x: [B, L, ..], the parts' channels and then others, which are left alone.
    taps: [B, width, channels of all parts] float32, the current token's first; one more is a bias.
    ages: [B, L] int32, tokens before one in its segment, or None.
  """
  out_shape = lambda _: [
    jax.ShapeDtypeStruct((*x.shape[:2], part.channels), x.dtype) for part in parts
  ]
  how = dict(parts=parts, width=width, interpret=interpret)
  return _call(_forward_body, "short_conv_fwd", x, (x, taps, ages), out_shape, **how)


def backward(x, taps, ages, ds, *, parts, width, interpret):
  """dx in x's dtype, anything where its channels are of no part, and dtaps as taps."""
  out_shape = lambda blocks: [
    jax.ShapeDtypeStruct(x.shape, x.dtype),
    jax.ShapeDtypeStruct((x.shape[0], blocks, *taps.shape[1:]), F32),
  ]
  args, how = (x, taps, *ds, ages), dict(parts=parts, width=width, interpret=interpret)
  dx, dtaps = _call(_backward_body, "short_conv_bwd", x, args, out_shape, **how)
  return dx, dtaps.sum(axis=1)
