"""Rotary position embeddings on TPU: one pass over [B, L, H * d], without a layout copy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.differentiable import KernelVJP, call_kernel
from pallas_kernels.common.platform import require_platform
from pallas_kernels.common.tiling import LANES, TPU_VMEM_LIMIT, pad_axis, round_up
from pallas_kernels.rope.reference import angles_of, rotate

F32 = jnp.float32
_TOKENS, _ELEMENTS = 256, 2**20  # upper limits per block


def _body(table_ref, x_ref, y_ref, *, size, sign):
  # table [T, lanes]: cosines then sines of a head, repeated to fill the lanes; x, y [T, D]
  half, lanes = size // 2, table_ref.shape[1]
  first = lax.broadcasted_iota(jnp.int32, table_ref.shape, 1) & (size - 1) < half
  # np.int32: Python integers would be 64-bit with jax_enable_x64.
  roll_left = lambda x: pltpu.roll(x, np.int32(lanes - half), 1)  # lane i + half moves to lane i
  roll_right = lambda x: pltpu.roll(x, np.int32(half), 1)
  table = table_ref[...]
  cos = jnp.where(first, table, roll_right(table))
  sin = jnp.where(first, -roll_left(table), table) * sign
  for i in range(0, x_ref.shape[1], lanes):
    x = x_ref[:, i : i + lanes].astype(F32)
    other = roll_right(x) if lanes == size else jnp.where(first, roll_left(x), roll_right(x))
    y_ref[:, i : i + lanes] = (x * cos + other * sin).astype(y_ref.dtype)


def _rotate(x, positions, *, base, sign, interpret):
  B, L, H, d = x.shape
  lanes = max(d, LANES)
  T = min(_TOKENS, max(16, _ELEMENTS // (H * d) & -16), round_up(L, 16))
  Lp = round_up(L, T)
  angles = angles_of(positions, d // 2, base, F32)
  table = jnp.tile(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1), lanes // d)
  block = lambda width: pl.BlockSpec((None, T, width), lambda b, n: (b, n, 0))
  y = pl.pallas_call(
    functools.partial(_body, size=d, sign=sign),
    grid=(B, Lp // T),
    in_specs=[block(lanes), block(H * d)],
    out_specs=block(H * d),
    out_shape=jax.ShapeDtypeStruct((B, Lp, H * d), x.dtype),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=TPU_VMEM_LIMIT
    ),
    interpret=interpret,
    name="rope",
  )(pad_axis(table, 1, Lp), pad_axis(x.reshape(B, L, H * d), 1, Lp))
  return y[:, :L].reshape(x.shape)


def rotate_tpu(x, positions, base, interpret=False):
  """Apply `reference.rotate` as one kernel, for inputs without an `unsupported_reason`."""
  x = x if interpret else require_platform(x, "tpu", "rope")
  run = functools.partial(_rotate, base=base, interpret=interpret)
  kernel = KernelVJP(
    forward=lambda *args: (run(*args, sign=1.0),),
    forward_saving=lambda *args: ((run(*args, sign=1.0),), ()),
    # The transpose of a rotation is the inverse rotation.
    backward=lambda args, _, d: (run(*d, args[1], sign=-1.0), None),
    reference=lambda *args: (rotate(*args, base),),
    name="rope",
  )
  (y,) = call_kernel(kernel, x, positions)
  return y
