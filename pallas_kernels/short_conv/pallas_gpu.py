"""Short convolutions on NVIDIA GPUs: a program takes some tokens of one head, a block at a time.

Heads may be of several parts of x, as q, k and v are of one product: each part has an output of its
own. Neighbouring tokens are read from where they lie; all but the first reading of a token meets a
cache. The backward computes the convolution again, for each token as often as taps saw it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.tiling import cdiv

F32 = jnp.float32
ELEMENTS = 2048  # of a block: 16 registers a thread at 4 warps
# Tokens of a program, in blocks one after the other: every program writes its sums of the gradient
# of the taps.
TOKENS = 128
WARPS = 4


class Part(NamedTuple):
  """Channels of x that are heads of one size, and what follows their convolution."""

  finish: Callable  # (y, total) -> z, of float32 y [tokens, size] and the sum of the channels
  size: int  # a power of two
  channels: int


def _total(x):
  return jnp.sum(x, axis=1, keepdims=True)


def _of_its_part(parts, run):
  """run(i, part, its first channel in x, the head's number in it) for this program's part i."""
  unit, heads, channels = pl.program_id(1), 0, 0
  for i, part in enumerate(parts):
    first, heads = heads, heads + part.channels // part.size
    mine = functools.partial(run, i, part, channels, unit - first)
    if len(parts) == 1:
      mine()
    else:
      pl.when((unit >= first) & (unit < heads))(mine)
    channels += part.channels


class _Head:
  """A program's tokens of one head, of x [B, L, ..] and of an array of its part."""

  def __init__(self, part, start, head, tokens, taps_ref, ages_refs, width):
    self.b, self.n = pl.program_id(2), pl.program_id(0)
    self.T = min(ELEMENTS // part.size, tokens)
    self.blocks = tokens // self.T
    self.own = head * part.size + lax.broadcasted_iota(jnp.int32, (1, part.size), 1)
    self.cols = pl.ds(start + head * part.size, part.size)
    self._start, self._first, self._ages = start, self.n * tokens, ages_refs
    self.width = width
    self.taps = [taps_ref[self.b, s, self.cols][None] for s in range(taps_ref.shape[1])]

  def _at(self, ref, i, shift, in_x):
    at = self._first + i * self.T + shift + lax.broadcasted_iota(jnp.int32, (self.T, 1), 0)
    inside = jnp.broadcast_to((at >= 0) & (at < ref.shape[1]), (self.T, self.own.shape[1]))
    return ref.at[self.b, at, self._start + self.own if in_x else self.own], inside

  def load(self, ref, i, shift, in_x=True):
    """Block i, `shift` tokens later; zeros outside the row."""
    at, inside = self._at(ref, i, shift, in_x)
    return pltriton.load(at, mask=inside, other=0.0).astype(F32)

  def store(self, ref, i, x, in_x=True):
    at, inside = self._at(ref, i, 0, in_x)
    pltriton.store(at, x.astype(ref.dtype), mask=inside)

  def of_document(self, s, i, shift, x):
    """x where the token s before it is of its document; x is `shift` tokens later."""
    if not self._ages:
      return x
    (ages,) = self._ages
    at = self._first + i * self.T + shift + lax.broadcasted_iota(jnp.int32, (self.T,), 0)
    age = ages[self.b, jnp.clip(at, 0, ages.shape[1] - 1)]
    return jnp.where((age >= s)[:, None], x, 0.0)

  def seen(self, ref, s, i, shift):
    return self.of_document(s, i, shift, self.load(ref, i, shift - s))

  def conv(self, ref, i, shift):
    y = sum(self.seen(ref, s, i, shift) * self.taps[s] for s in range(self.width))
    return sum(self.taps[self.width :], start=y)


def _forward_body(x_ref, taps_ref, *refs, parts, tokens, width):
  y_refs, ages_refs = refs[-len(parts) :], refs[: -len(parts)]

  def run(number, part, start, head):
    own = _Head(part, start, head, tokens, taps_ref, ages_refs, width)

    def block(i, _):
      y = part.finish(own.conv(x_ref, i, 0), _total)
      own.store(y_refs[number], i, y, in_x=False)

    lax.fori_loop(0, own.blocks, block, None)

  _of_its_part(parts, run)


def _backward_body(x_ref, taps_ref, *refs, parts, tokens, width):
  d_refs, (*ages_refs, dx_ref, dtaps_ref) = refs[: len(parts)], refs[len(parts) :]

  def run(number, part, start, head):
    own = _Head(part, start, head, tokens, taps_ref, ages_refs, width)

    def block(i, dtaps):
      def step(j, carry):
        s = width - 1 - j
        y = own.conv(x_ref, i, s)
        d = own.load(d_refs[number], i, s, in_x=False)
        (dy,) = jax.vjp(lambda y: part.finish(y, _total), y)[1](d)
        tap = taps_ref[own.b, s, own.cols][None]
        return carry[0] + own.of_document(s, i, s, dy) * tap, dy

      # A loop, not unrolled: what its rounds read in common would be kept in registers, and spill.
      zero = jnp.zeros((own.T, part.size), F32)
      dx, dy = lax.fori_loop(0, width, step, (zero, zero))
      own.store(dx_ref, i, dx)
      factors = [own.seen(x_ref, s, i, 0) if s < width else 1.0 for s in range(len(dtaps))]
      return [total + jnp.sum(dy * x, axis=0) for total, x in zip(dtaps, factors)]

    zero = jnp.zeros((part.size,), F32)
    dtaps = lax.fori_loop(0, own.blocks, block, [zero] * len(own.taps))
    for s, total in enumerate(dtaps):
      dtaps_ref[own.b, own.n, s, own.cols] = total

  _of_its_part(parts, run)


def _call(body, name, x, args, parts, out_shape, interpret, **options):
  B, L, _ = x.shape
  tokens = min(TOKENS, pl.next_power_of_2(L))
  blocks, heads = cdiv(L, tokens), sum(part.channels // part.size for part in parts)
  whole = pl.BlockSpec(memory_space=pl.ANY)
  args = [y for y in args if y is not None]
  out_shape = out_shape(blocks)
  return pl.pallas_call(
    functools.partial(body, parts=parts, tokens=tokens, **options),
    grid=(blocks, heads, B),
    in_specs=[whole] * len(args),
    out_specs=[whole] * len(out_shape),
    out_shape=out_shape,
    compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
    interpret=interpret,
    name=name,
  )(*args)


def forward(x, taps, ages, *, parts, width, interpret):
  """finish(sum_s taps_s x_{t-s} + bias) of every head, an array [B, L, channels] for each part.

  Args:
    x: [B, L, ..], the parts' channels and then others, which are left alone.
    taps: [B, width, channels of all parts] float32, the current token's first; one more is a bias.
    ages: [B, L] int32, tokens before one in its document, or None.
  """
  out_shape = lambda _: [
    jax.ShapeDtypeStruct((*x.shape[:2], part.channels), x.dtype) for part in parts
  ]
  options = dict(width=width)
  return _call(
    _forward_body, "short_conv_fwd", x, (x, taps, ages), parts, out_shape, interpret, **options
  )


def backward(x, taps, ages, ds, *, parts, width, interpret):
  """dx in x's dtype, nothing where x's channels are of no part, and dtaps as taps."""
  out_shape = lambda blocks: [
    jax.ShapeDtypeStruct(x.shape, x.dtype),
    jax.ShapeDtypeStruct((x.shape[0], blocks, *taps.shape[1:]), F32),
  ]
  args, options = (x, taps, *ds, ages), dict(width=width)
  dx, dtaps = _call(
    _backward_body, "short_conv_bwd", x, args, parts, out_shape, interpret, **options
  )
  return dx, dtaps.sum(axis=1)
