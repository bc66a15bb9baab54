"""Tiles of the GPU kernels, chosen by compiling for each chip; inputs padded to them."""

import functools
import logging
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.common import gpu, measured_tiles
from pallas_kernels.common.tiling import pad_axis, round_up
from pallas_kernels.delta_rule.checks import FAR_BELOW

F32 = jnp.float32


class DeltaTileGPU(NamedTuple):
  block_k: int
  block_v: int
  warps: int
  stages: int = 1  # of a loop's loads that are in flight at once; 1 loads nothing ahead


# GPUs without a table of their own, or not named when a kernel is traced: nothing is loaded ahead,
# so that no block takes more than 48 KiB of shared memory.
_BF16 = dict(
  intra=DeltaTileGPU(32, 32, 8),
  scores=DeltaTileGPU(64, 64, 4),
  ut_fwd=DeltaTileGPU(64, 64, 8),
  ut_triton=DeltaTileGPU(64, 64, 8),
  ut_bwd=DeltaTileGPU(32, 32, 8),
  fwd=DeltaTileGPU(64, 32, 4),
  states=DeltaTileGPU(64, 64, 4),
  dstates=DeltaTileGPU(64, 32, 4),
  grads=DeltaTileGPU(16, 32, 8),
  channels_scores=DeltaTileGPU(32, 32, 4),
  channels_dscores=DeltaTileGPU(64, 64, 4),
)
_BF16_256 = _BF16 | dict(states=DeltaTileGPU(64, 32, 4), channels_states=DeltaTileGPU(64, 16, 4))
_F32 = dict(
  intra=DeltaTileGPU(16, 16, 8),
  scores=DeltaTileGPU(32, 32, 4),
  ut_fwd=DeltaTileGPU(16, 16, 8),
  ut_triton=DeltaTileGPU(32, 16, 4),
  ut_bwd=DeltaTileGPU(16, 16, 8),
  fwd=DeltaTileGPU(32, 16, 8),
  states=DeltaTileGPU(64, 32, 4),
  dstates=DeltaTileGPU(32, 16, 8),
  grads=DeltaTileGPU(16, 16, 4),
  channels_dscores=DeltaTileGPU(16, 16, 4),
)
_F32_256 = _F32 | dict(states=DeltaTileGPU(64, 16, 4), dstates=DeltaTileGPU(64, 16, 4))
# (dtype, padded dk, at least 64) -> kernel -> tile.
OTHER = {
  ("bfloat16", 64): _BF16,
  ("bfloat16", 128): _BF16,
  ("bfloat16", 256): _BF16_256,
  ("float32", 64): _F32,
  ("float32", 128): _F32,
  ("float32", 256): _F32_256,
}
_H100_BF16 = _BF16 | dict(
  intra=DeltaTileGPU(64, 64, 4),
  scores=DeltaTileGPU(64, 64, 4, 2),
  fwd=DeltaTileGPU(64, 32, 4, 2),
  states=DeltaTileGPU(64, 64, 4, 2),
  dstates=DeltaTileGPU(64, 32, 4, 2),
  grads=DeltaTileGPU(64, 64, 4),
  full_grads=DeltaTileGPU(64, 64, 4),
  linear_grads=DeltaTileGPU(64, 64, 4),
  channels_intra=DeltaTileGPU(32, 32, 4),
  channels_scores=DeltaTileGPU(64, 64, 4, 2),
  channels_fwd=DeltaTileGPU(64, 32, 4),
  channels_dstates=DeltaTileGPU(64, 32, 4),
  linear_channels_fwd=DeltaTileGPU(64, 32, 4, 2),
  linear_channels_dstates=DeltaTileGPU(64, 32, 4, 2),
  channels_dscores=DeltaTileGPU(64, 64, 4, 2),
  channels_grads=DeltaTileGPU(32, 32, 4),
)
# 8 warps repeat products of chunks of 32; with 4 full inputs would spill 4 bytes.
_H100_F32 = _F32 | dict(
  intra=DeltaTileGPU(16, 16, 4),
  full_intra=DeltaTileGPU(16, 16, 8),
  fwd=DeltaTileGPU(32, 16, 4),
  dstates=DeltaTileGPU(32, 16, 4),
  full_dstates=DeltaTileGPU(32, 16, 8),
)
H100 = OTHER | {
  # 64 x 64 would spill 144 bytes at d = 64, this 80 bytes at 128.
  ("bfloat16", 64): _H100_BF16 | dict(full_grads=DeltaTileGPU(32, 64, 4)),
  ("bfloat16", 128): _H100_BF16,
  ("float32", 64): _H100_F32,
  ("float32", 128): _H100_F32,
}
_A100_BF16 = _BF16 | dict(
  intra=DeltaTileGPU(64, 64, 4),
  full_intra=DeltaTileGPU(32, 32, 8),
  scores=DeltaTileGPU(64, 64, 4, 2),
  fwd=DeltaTileGPU(64, 32, 4, 2),
  states=DeltaTileGPU(64, 32, 4, 2),
  dstates=DeltaTileGPU(64, 32, 4, 2),
  grads=DeltaTileGPU(32, 32, 4),
  full_grads=DeltaTileGPU(16, 32, 8),
  channels_intra=DeltaTileGPU(32, 32, 8),
  channels_fwd=DeltaTileGPU(64, 32, 4),
  channels_dstates=DeltaTileGPU(64, 32, 4),
  linear_channels_fwd=DeltaTileGPU(64, 32, 4, 2),
  linear_channels_dstates=DeltaTileGPU(64, 32, 4, 2),
  channels_dscores=DeltaTileGPU(64, 64, 4, 2),
  channels_grads=DeltaTileGPU(16, 32, 8),
)
A100 = OTHER | {("bfloat16", 64): _A100_BF16, ("bfloat16", 128): _A100_BF16}
_B200_BF16 = _BF16 | dict(
  intra=DeltaTileGPU(64, 64, 4),
  scores=DeltaTileGPU(64, 64, 4, 2),
  fwd=DeltaTileGPU(64, 32, 4, 2),
  states=DeltaTileGPU(64, 64, 4, 2),
  dstates=DeltaTileGPU(64, 32, 4, 2),
  full_grads=DeltaTileGPU(64, 64, 8),
  channels_intra=DeltaTileGPU(32, 32, 4),
  channels_scores=DeltaTileGPU(64, 64, 4, 2),
  channels_fwd=DeltaTileGPU(64, 32, 4),
  channels_dstates=DeltaTileGPU(64, 32, 4),
  linear_channels_fwd=DeltaTileGPU(64, 32, 4, 2),
  linear_channels_dstates=DeltaTileGPU(64, 32, 4, 2),
  channels_dscores=DeltaTileGPU(64, 64, 4, 2),
  channels_grads=DeltaTileGPU(32, 32, 4),
)
B200 = OTHER | {("bfloat16", 64): _B200_BF16, ("bfloat16", 128): _B200_BF16}
# By a part of the name that jax gives a GPU.
TILES = {"A100": A100, "H100": H100, "H200": H100, "B200": B200}
# Six products per float32 product: at chunk 64 the backward spills kilobytes.
MAX_CHUNK = {"bfloat16": 64, "float32": 32}


def tile_for(kernel, k, full=False, delta_rule=True, channels=False):
  """The tile of a kernel for keys k [B L H dk], dk a power of two: as measured here, or the chip's.

  A GPU that has neither takes OTHER, and a warning says so once.

  Args:
    full: with gates, whose decays take registers; tiles "full_..." are for these.
    delta_rule: the delta rule; tiles "linear_..." are for linear attention.
    channels: with gates of key channels, for which tiles "channels_..." are.
  """
  key = _key(k.dtype.name, k.shape[-1])
  table = table_for(gpu.device_kind())[key]
  kinds = ["linear_"] * (not delta_rule) + ["full_"] * full
  if channels:
    kinds = ["linear_channels_"] * (not delta_rule) + ["channels_"]
  name = next((kind + kernel for kind in kinds if kind + kernel in table), kernel)
  measured = measured_tiles.find(name, *key)
  return DeltaTileGPU(*measured) if measured else table[name]


def scores_in_place(k):
  """Whether kernels that carry a state compute the scores of a chunk, without gates, themselves.

  They need q and k anyway: P is neither written nor read, and q not read for it. H100, d = 128: as
  many blocks and barriers as with a P that is loaded (169 registers for 110 in `fwd`, 168 for 94 in
  `dstates`). On A100 280 and 144 bytes would spill, on B200 `fwd` has 125 barriers for 68, and at
  d = 256 328 bytes spill on H100.
  """
  dtype, size = _key(k.dtype.name, k.shape[-1])
  return table_for(gpu.device_kind()) is H100 and dtype == "bfloat16" and size <= 128


# What the delta rule runs on them: the time of another kernel's tile would be noise.
_OF_PLAIN_INPUTS = ("intra", "fwd", "states", "dstates", "grads")


def alternatives(dtype, dk):
  """Kernel -> the tile that `experiments.device_check` times beside its own, for plain inputs.

  For a chip with a table that of OTHER, for others H100's.
  """
  own, key = table_for(gpu.device_kind()), _key(dtype, dk)
  others = (H100 if own is OTHER else OTHER)[key]
  return {
    kernel: tile
    for kernel, tile in others.items()
    if tile != own[key].get(kernel) and kernel in _OF_PLAIN_INPUTS
  }


def _key(dtype, dk):
  return dtype, min(max(dk, 64), 256)


@functools.cache
def table_for(device_kind):
  """The tiles of the GPU that jax calls so, None if it is not known."""
  for name, table in TILES.items():
    if name in (device_kind or ""):
      return table
  if device_kind is not None:
    logging.getLogger(__name__).warning(
      "No tiles were chosen for %s: the delta rule's kernels take careful ones."
      " `python -m experiments.device_check` measures its own.",
      device_kind,
    )
  return OTHER


def clamp_chunk(chunk, dtype):
  """The chunk that was asked for, 64 if None, or the largest that does not spill for the dtype."""
  return min(chunk or 64, MAX_CHUNK[jnp.dtype(dtype).name])


def _power_of_two(size):
  return max(16, 1 << (size - 1).bit_length())


def prepare(q, k, v, beta, g, S0, segment_ids, chunk):
  """Pads to whole chunks and power-of-two head sizes; numbers the segments of a row from 0."""
  if chunk & (chunk - 1) or chunk < 16:
    raise ValueError(f"chunk must be a power of two of at least 16, got {chunk}")
  L = round_up(q.shape[1], chunk)
  pk, pv = _power_of_two(k.shape[3]), _power_of_two(v.shape[3])
  q, k = (pad_axis(pad_axis(x, 1, L), 3, pk) for x in (q, k))
  v = pad_axis(pad_axis(v, 1, L), 3, pv)
  beta = None if beta is None else pad_axis(beta, 1, L)
  if g is not None and g.ndim == 4:
    # The kernels raise it themselves: a raised g would be kept, as large as two k of bfloat16.
    g = pad_axis(pad_axis(g, 1, L), 3, pk)
  elif g is not None:
    g = pad_axis(jnp.maximum(g, FAR_BELOW), 1, L)
  S0 = None if S0 is None else pad_axis(pad_axis(S0.astype(F32), 2, pk), 3, pv)
  segments = None
  if segment_ids is not None:
    # Counted where the id changes: one that comes back later is a new segment.
    change = (segment_ids[:, 1:] != segment_ids[:, :-1]).astype(jnp.int32)
    segments = jnp.cumsum(jnp.pad(change, ((0, 0), (1, 0))), axis=1)
    segments = pad_axis(segments, 1, L, "edge")
  return q, k, v, beta, g, segments, S0


def call(kernel, body, args, out_shape, *, grid, tile, interpret, delta_rule=True):
  """`gpu.call` of a kernel of the rule, with its tile."""
  name = f"{'delta_rule' if delta_rule else 'linear_attention'}_{kernel}"
  how = dict(grid=grid, warps=tile.warps, stages=tile.stages, interpret=interpret)
  return gpu.launch(body, name, args, out_shape, **how)
