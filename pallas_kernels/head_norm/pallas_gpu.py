"""Fused gated per-head RMSNorm on NVIDIA GPUs, forward and backward.

One program handles `blocks` blocks of tokens of one head, one block after the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.common.gpu import launch
from pallas_kernels.common.tiling import cdiv
from pallas_kernels.head_norm.reference import gated_rms_norm

F32 = jnp.float32
ELEMENTS = 2048  # elements per block: 16 registers per thread with 4 warps
# Blocks per program, processed sequentially: each program writes one partial sum of dscale.
BLOCKS = 8
WARPS = 4


class _TokenBlocks:
  """Loads and stores of one program: `blocks` blocks of T tokens of one head, arrays [B, L, D]."""

  def __init__(self, T, size, blocks):
    self.n, self.head, self.b = (pl.program_id(i) for i in range(3))
    self.blocks, self._first = blocks, self.n * (T * blocks)
    self._tokens = lax.broadcasted_iota(jnp.int32, (T, 1), 0)
    self._channels = self.head * size + lax.broadcasted_iota(jnp.int32, (1, size), 1)

  def _address(self, ref, i):
    T, size = self._tokens.shape[0], self._channels.shape[1]
    at = self._first + i * T + self._tokens
    inside = jnp.broadcast_to(at < ref.shape[1], (T, size))
    return ref.at[self.b, at, self._channels], inside

  def load(self, refs, i):
    """Load block i of each ref as float32; zeros after the last token."""
    addresses = (self._address(ref, i) for ref in refs)
    return [pltriton.load(at, mask=inside, other=0.0).astype(F32) for at, inside in addresses]

  def store(self, ref, i, x):
    at, inside = self._address(ref, i)
    pltriton.store(at, x.astype(ref.dtype), mask=inside)


def _forward_body(x_ref, scale_ref, *refs, tile, norm):
  # x, gate?, y [B, L, D]; scale [B, size]
  *gate_refs, y_ref = refs
  tokens = _TokenBlocks(*tile)
  scale = scale_ref[tokens.b][None]

  def step(i, _):
    x, *gate = tokens.load((x_ref, *gate_refs), i)
    tokens.store(y_ref, i, norm(x, scale, *gate))

  lax.fori_loop(0, tokens.blocks, step, None)


def _backward_body(x_ref, d_ref, scale_ref, *refs, tile, norm):
  # Also d, dx, dgate? [B, L, D]; dscale [B, N, H, size]
  *gate_refs, dscale_ref, dx_ref = refs if len(refs) == 2 else refs[:3]
  dgate_refs = refs[3:]
  tokens = _TokenBlocks(*tile)
  scale = scale_ref[tokens.b][None]

  def step(i, dscale):
    x, d, *gate = tokens.load((x_ref, d_ref, *gate_refs), i)
    dx, dscale_i, *dgate = jax.vjp(norm, x, scale, *gate)[1](d)
    for ref, y in zip((dx_ref, *dgate_refs), (dx, *dgate), strict=True):
      tokens.store(ref, i, y)
    return dscale + dscale_i

  dscale = lax.fori_loop(0, tokens.blocks, step, jnp.zeros_like(scale))
  dscale_ref[tokens.b, tokens.n, tokens.head] = dscale[0]


def _call(body, name, args, out_shape, *, eps, gate_activation, size, interpret):
  B, L, D = args[0].shape
  T = min(ELEMENTS // size, pl.next_power_of_2(L))
  blocks = min(BLOCKS, cdiv(L, T))
  grid = cdiv(L, T * blocks), D // size, B
  norm = lambda x, scale, gate=None: gated_rms_norm(x, scale, gate, eps, gate_activation)
  body = functools.partial(body, tile=(T, size, blocks), norm=norm)
  return launch(body, name, args, out_shape(grid[:2]), grid=grid, warps=WARPS, interpret=interpret)


def forward(x, scale, gate, **options):
  """Return scale x / sqrt(mean(x^2) + eps) gate_activation(gate) per `size` channels of x.

  Args:
    x: [B, L, D].
    scale: [B, size] float32.
    gate: [B, L, D] or None.
    options: eps, gate_activation, size (a power of two) and interpret.
  """
  out_shape = lambda _: [jax.ShapeDtypeStruct(x.shape, x.dtype)]
  return _call(_forward_body, "head_norm_fwd", (x, scale, gate), out_shape, **options)[0]


def backward(x, scale, gate, d, **options):
  """Return (dx, dscale [B, size] float32, dgate or None); dx and dgate in the input dtypes."""
  like = lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype)
  out_shape = lambda grid: [
    jax.ShapeDtypeStruct((x.shape[0], *grid, scale.shape[1]), F32),
    like(x),
    *([] if gate is None else [like(gate)]),
  ]
  dscale, dx, *dgate = _call(
    _backward_body, "head_norm_bwd", (x, d, scale, gate), out_shape, **options
  )
  return dx, dscale.sum(axis=(1, 2)), *(dgate or [None])
