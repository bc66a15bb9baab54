"""Tile sizes of the GPU attention kernels, chosen by AOT compilation for each chip."""

from typing import NamedTuple

from pallas_kernels.common import gpu


class AttentionTileGPU(NamedTuple):
  """Launch parameters of one kernel."""

  own: int  # tokens that a program owns: queries (forward), keys then queries (backward)
  step: int  # tokens of the other side loaded per loop iteration
  warps: int
  stages: int = 1  # software pipelining stages of a loop's loads; 1 does not prefetch


_Tile = AttentionTileGPU
# By padded head size, at least 64.
# For GPUs without a table: no prefetching, at most 48 KiB of shared memory.
OTHER = {
  64: dict(fwd=_Tile(128, 64, 4), bwd=_Tile(64, 32, 4)),
  128: dict(fwd=_Tile(128, 64, 8), bwd=_Tile(32, 32, 4)),
}
# Registers and occupancy (blocks per SM), no spills: 124 and 2, 218 and 2; 226 and 1, 255 and 1.
H100 = {
  64: dict(fwd=_Tile(128, 64, 8, 2), bwd=_Tile(64, 64, 4, 2)),
  128: dict(fwd=_Tile(128, 128, 8, 2), bwd=_Tile(128, 64, 8, 2)),
}
# 254 and 2, 222 and 2; 231 and 1, 243 and 1.
A100 = {
  64: dict(fwd=_Tile(128, 64, 4, 2), bwd=_Tile(64, 32, 4, 2)),
  128: dict(fwd=_Tile(128, 64, 8, 2), bwd=_Tile(64, 64, 8, 2)),
}
# 123 and 2, 167 and 1; 252 and 1, 199 and 1. Matmuls with fewer than 128 rows run at half the rate.
B200 = {
  64: dict(fwd=_Tile(128, 64, 8, 2), bwd=_Tile(128, 64, 8, 2)),
  128: dict(fwd=_Tile(128, 128, 8, 2), bwd=_Tile(128, 64, 8, 2)),
}
# By a substring of JAX's device kind.
TILES = {"A100": A100, "H100": H100, "H200": H100, "B200": B200}


def power_of_two(size: int) -> int:
  """Return the smallest power of two that is >= size and >= 16."""
  return max(16, 1 << (size - 1).bit_length())


def tile_for(kernel: str, length: int, head_size: int) -> AttentionTileGPU:
  """Return the tile of "fwd" or "bwd" on the target GPU, no longer than the sequence needs."""
  kind = gpu.device_kind() or ""
  table = next((table for name, table in TILES.items() if name in kind), OTHER)
  tile = table[max(64, power_of_two(head_size))][kernel]
  longest = power_of_two(length)
  return tile._replace(own=min(tile.own, longest), step=min(tile.step, longest))
