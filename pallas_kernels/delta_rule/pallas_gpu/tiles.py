"""Tile sizes of the GPU kernels per chip, chosen from AOT-compiled resource usage; padding."""

import functools
import logging
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.common import gpu, measured_tiles
from pallas_kernels.common.tiling import pad_axis, round_up
from pallas_kernels.delta_rule.checks import FAR_BELOW

F32 = jnp.float32


class DeltaTileGPU(NamedTuple):
  """Block sizes and launch parameters of one kernel."""

  block_k: int
  block_v: int
  warps: int
  stages: int = 1  # software pipelining stages of a loop's loads; 1 does not prefetch


# For GPUs without a table, or unknown at trace time: without prefetching no block takes more than
# 48 KiB of shared memory.
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
# 8 warps compute the matmuls of chunks of 32 redundantly; gated inputs would spill 4 bytes with 4.
_H100_F32 = _F32 | dict(
  intra=DeltaTileGPU(16, 16, 4),
  full_intra=DeltaTileGPU(16, 16, 8),
  fwd=DeltaTileGPU(32, 16, 4),
  dstates=DeltaTileGPU(32, 16, 4),
  full_dstates=DeltaTileGPU(32, 16, 8),
)
H100 = OTHER | {
  # 64 x 64 would spill 144 bytes at d = 64; 32 x 64 would spill 80 bytes at 128.
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
# Substring of JAX's device kind -> table.
TILES = {"A100": A100, "H100": H100, "H200": H100, "B200": B200}
# float32 takes six bfloat16 matmuls: with chunks of 64 the backward pass spills kilobytes.
MAX_CHUNK = {"bfloat16": 64, "float32": 32}


def tile_for(kernel, k, gated=False, delta_rule=True, per_channel=False):
  """Return the tile of a kernel: measured on this machine, else from the chip's table, else OTHER.

  The use of OTHER for a known GPU logs one warning.

  Args:
    k: keys [B L H dk], dk a power of two.
    gated: with per-head gates, whose decays take registers; prefers tiles named "full_...".
    delta_rule: False for linear attention, which prefers tiles named "linear_...".
    per_channel: with per-channel gates, which prefer tiles named "channels_...".
  """
  key = _key(k.dtype.name, k.shape[-1])
  table = table_for(gpu.device_kind())[key]
  kinds = ["linear_"] * (not delta_rule) + ["full_"] * gated
  if per_channel:
    kinds = ["linear_channels_"] * (not delta_rule) + ["channels_"]
  name = next((kind + kernel for kind in kinds if kind + kernel in table), kernel)
  measured = measured_tiles.find(name, *key)
  return DeltaTileGPU(*measured) if measured else table[name]


def scores_in_place(k):
  """Return whether, without gates, the kernels that carry a state compute the scores themselves.

  They load q and k anyway: P is never materialized, and `intra` does not read q. On H100 with
  d = 128, occupancy and barriers are the same as with a loaded P (169 instead of 110 registers in
  `fwd`, 168 instead of 94 in `dstates`). On A100 280 and 144 bytes would spill, on B200 `fwd` would
  have 125 instead of 68 barriers, and with d = 256 328 bytes would spill on H100.
  """
  dtype, size = _key(k.dtype.name, k.shape[-1])
  return table_for(gpu.device_kind()) is H100 and dtype == "bfloat16" and size <= 128


# Kernels that the delta rule without gates runs. Times of other kernels' tiles would be noise.
_KERNELS_WITHOUT_GATES = ("intra", "fwd", "states", "dstates", "grads")


def alternatives(dtype, dk):
  """Return kernel -> alternative tile, for `experiments.device_check` to time; without gates.

  The tiles of OTHER for a chip with a table, else those of H100.
  """
  own, key = table_for(gpu.device_kind()), _key(dtype, dk)
  others = (H100 if own is OTHER else OTHER)[key]
  return {
    kernel: tile
    for kernel, tile in others.items()
    if tile != own[key].get(kernel) and kernel in _KERNELS_WITHOUT_GATES
  }


def _key(dtype, dk):
  return dtype, min(max(dk, 64), 256)


@functools.cache
def table_for(device_kind):
  """Return the table for JAX's name of a GPU; OTHER, with a warning, if it has none.

  Args:
    device_kind: None if the GPU is unknown at trace time; no warning.
  """
  for name, table in TILES.items():
    if name in (device_kind or ""):
      return table
  if device_kind is not None:
    logging.getLogger(__name__).warning(
      "No tile sizes are known for %s: the delta-rule kernels use conservative defaults."
      " Run `python -m experiments.device_check` to measure and cache tiles for this GPU.",
      device_kind,
    )
  return OTHER


def clamp_chunk(chunk, dtype):
  """Return `chunk` (64 if None), at most the largest that does not spill for the dtype."""
  return min(chunk or 64, MAX_CHUNK[jnp.dtype(dtype).name])


def _power_of_two(size):
  return max(16, 1 << (size - 1).bit_length())


def prepare(q, k, v, beta, g, S0, segment_ids, chunk):
  """Pad to full chunks and power-of-two head sizes; number the segments of each sequence from 0.

  Returns:
    q, k, v, beta, g, segments, S0.
  """
  if chunk & (chunk - 1) or chunk < 16:
    raise ValueError(f"chunk is {chunk}, expected a power of two >= 16.")
  L = round_up(q.shape[1], chunk)
  pk, pv = _power_of_two(k.shape[3]), _power_of_two(v.shape[3])
  q, k = (pad_axis(pad_axis(x, 1, L), 3, pk) for x in (q, k))
  v = pad_axis(pad_axis(v, 1, L), 3, pv)
  beta = None if beta is None else pad_axis(beta, 1, L)
  if g is not None and g.ndim == 4:
    # The kernels clamp it: a clamped copy would be a residual twice the size of a bfloat16 k.
    g = pad_axis(pad_axis(g, 1, L), 3, pk)
  elif g is not None:
    g = pad_axis(jnp.maximum(g, FAR_BELOW), 1, L)
  S0 = None if S0 is None else pad_axis(pad_axis(S0.astype(F32), 2, pk), 3, pv)
  segments = None
  if segment_ids is not None:
    # Count changes of the id: an id that occurs again later is a new segment.
    change = (segment_ids[:, 1:] != segment_ids[:, :-1]).astype(jnp.int32)
    segments = jnp.cumsum(jnp.pad(change, ((0, 0), (1, 0))), axis=1)
    segments = pad_axis(segments, 1, L, "edge")
  return q, k, v, beta, g, segments, S0
