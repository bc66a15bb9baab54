"""Short convolution on NVIDIA GPUs: a program takes some tokens of one head.

Neighbouring tokens are read from where they lie; all but the first reading of a token meets a
cache. The backward computes the convolution again, for each token as often as taps saw it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.tiling import round_up

F32 = jnp.float32
ELEMENTS = 4096  # of a block: 32 registers a thread at 4 warps
WARPS = 4


def _total(x):
  return jnp.sum(x, axis=1, keepdims=True)


class _Block:
  """T tokens of one head, of x [B, L, D] and what goes with it."""

  def __init__(self, shape, taps_ref, ages_refs, width):
    T, size = shape
    self.b, self.n = pl.program_id(2), pl.program_id(0)
    first = pl.program_id(1) * size
    self.channels = first + lax.broadcasted_iota(jnp.int32, (1, size), 1)
    self.tokens = self.n * T + lax.broadcasted_iota(jnp.int32, (T, 1), 0)
    self.cols = pl.ds(first, size)
    self.width, self._ages = width, ages_refs
    self.taps = [taps_ref[self.b, s, self.cols][None] for s in range(taps_ref.shape[1])]

  def load(self, ref, shift):
    """Those `shift` tokens later; zeros outside the row."""
    at = self.tokens + shift
    inside = (at >= 0) & (at < ref.shape[1])
    x = ref[self.b, jnp.clip(at, 0, ref.shape[1] - 1), self.channels].astype(F32)
    return jnp.where(inside, x, 0.0)

  def of_document(self, s, shift, x):
    """x where the token s before it is of its document; x is `shift` tokens later."""
    if not self._ages:
      return x
    (ages,) = self._ages
    at = jnp.clip(self.tokens[:, 0] + shift, 0, ages.shape[1] - 1)
    return jnp.where((ages[self.b, at] >= s)[:, None], x, 0.0)

  def seen(self, ref, s, shift):
    return self.of_document(s, shift, self.load(ref, shift - s))

  def conv(self, ref, shift):
    y = sum(self.seen(ref, s, shift) * self.taps[s] for s in range(self.width))
    return sum(self.taps[self.width :], start=y)


def _forward_body(x_ref, taps_ref, *refs, finish, shape, width):
  *ages_refs, y_ref = refs
  block = _Block(shape, taps_ref, ages_refs, width)
  y = finish(block.conv(x_ref, 0), _total)
  y_ref[block.b, pl.ds(block.n * shape[0], shape[0]), block.cols] = y.astype(y_ref.dtype)


def _backward_body(x_ref, d_ref, taps_ref, *refs, finish, shape, width):
  *ages_refs, dx_ref, dtaps_ref = refs
  block = _Block(shape, taps_ref, ages_refs, width)

  def step(i, carry):
    s = width - 1 - i
    y = block.conv(x_ref, s)
    (dy,) = jax.vjp(lambda y: finish(y, _total), y)[1](block.load(d_ref, s))
    return carry[0] + block.of_document(s, s, dy) * taps_ref[block.b, s, block.cols][None], dy

  # A loop, not unrolled: what its rounds read in common would be kept in registers, and spill.
  zero = jnp.zeros(shape, F32)
  dx, dy = lax.fori_loop(0, width, step, (zero, zero))
  dx_ref[block.b, pl.ds(block.n * shape[0], shape[0]), block.cols] = dx.astype(dx_ref.dtype)
  for s in range(len(block.taps)):
    x = block.seen(x_ref, s, 0) if s < width else 1.0
    dtaps_ref[block.b, block.n, s, block.cols] = jnp.sum(dy * x, axis=0)


def _call(body, name, x, size, args, out_shape, interpret, **options):
  B, L, D = x.shape
  T = max(16, min(ELEMENTS // size, pl.next_power_of_2(L)))
  padded = round_up(L, T)
  whole = pl.BlockSpec(memory_space=pl.ANY)
  args = [y for y in args if y is not None]
  out_shape = out_shape(padded, padded // T)
  return pl.pallas_call(
    functools.partial(body, shape=(T, size), **options),
    grid=(padded // T, D // size, B),
    in_specs=[whole] * len(args),
    out_specs=[whole] * len(out_shape),
    out_shape=out_shape,
    compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
    interpret=interpret,
    name=name,
  )(*args)


def forward(x, taps, ages, *, finish, size, width, interpret):
  """As `pallas_tpu.forward`, for heads of a power of two channels."""
  B, L, D = x.shape
  out_shape = lambda padded, _: [jax.ShapeDtypeStruct((B, padded, D), x.dtype)]
  options = dict(finish=finish, width=width)
  (y,) = _call(
    _forward_body, "short_conv_fwd", x, size, (x, taps, ages), out_shape, interpret, **options
  )
  return y[:, :L]


def backward(x, taps, ages, d, *, finish, size, width, interpret):
  """dx in x's dtype, and dtaps [B, .., D] float32."""
  B, L, D = x.shape
  out_shape = lambda padded, blocks: [
    jax.ShapeDtypeStruct((B, padded, D), x.dtype),
    jax.ShapeDtypeStruct((B, blocks, *taps.shape[1:]), F32),
  ]
  options = dict(finish=finish, width=width)
  dx, dtaps = _call(
    _backward_body, "short_conv_bwd", x, size, (x, d, taps, ages), out_shape, interpret, **options
  )
  return dx[:, :L], dtaps.sum(axis=1)
