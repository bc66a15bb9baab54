"""Rotary positions on TPU: one pass over heads as they lie side by side."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.differentiable import Kernels, by_kernels
from pallas_kernels.common.platform import only_on
from pallas_kernels.common.tiling import LANES, TPU_VMEM_LIMIT, pad_axis, round_up
from pallas_kernels.rope.reference import angles_of, turn

F32 = jnp.float32
NO_FORWARD_MODE = (
  "forward mode (jax.jvp, jax.hessian, jax.linearize) is for rope's implementation"
  ' "plain": its kernel has a backward by hand instead.'
)
_TOKENS, _NUMBERS = 256, 2**20  # of a block: at most as many tokens, and numbers


def _body(table_ref, x_ref, y_ref, *, size, sign):
  # table [T lanes]: cosines and sines of a head side by side, for as many heads as fill the lanes;
  # x, y [T D]
  half, lanes = size // 2, table_ref.shape[1]
  first = lax.broadcasted_iota(jnp.int32, table_ref.shape, 1) & (size - 1) < half
  # Plain numbers would be 64-bit ones where jax_enable_x64 is set.
  back = lambda x: pltpu.roll(x, np.int32(lanes - half), 1)  # lane i + half comes to i
  on = lambda x: pltpu.roll(x, np.int32(half), 1)
  table = table_ref[...]
  cos = jnp.where(first, table, on(table))
  sin = jnp.where(first, -back(table), table) * sign
  for i in range(0, x_ref.shape[1], lanes):
    x = x_ref[:, i : i + lanes].astype(F32)
    other = on(x) if lanes == size else jnp.where(first, back(x), on(x))
    y_ref[:, i : i + lanes] = (x * cos + other * sin).astype(y_ref.dtype)


def _turn(x, positions, *, base, sign, interpret):
  B, L, H, d = x.shape
  lanes = max(d, LANES)
  T = min(_TOKENS, max(16, _NUMBERS // (H * d) & -16), round_up(L, 16))
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


def turn_tpu(x, positions, base, interpret=False):
  """`turn` as one kernel, for what `unsupported_reason` lets pass."""
  x = x if interpret else only_on(x, "tpu", "rope")
  run = functools.partial(_turn, base=base, interpret=interpret)
  kernels = Kernels(
    run=lambda *args: (run(*args, sign=1.0),),
    save=lambda *args: ((run(*args, sign=1.0),), ()),
    # Turned back.
    backward=lambda args, _, d: (run(*d, args[1], sign=-1.0), None),
    plain=lambda *args: (turn(*args, base),),
    unsupported_reason=NO_FORWARD_MODE,
  )
  (y,) = by_kernels(kernels, x, positions)
  return y
