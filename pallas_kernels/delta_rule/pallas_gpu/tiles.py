"""Tile sizes of the GPU kernels, by ahead-of-time compilation for H100 and A100."""

from typing import NamedTuple


class Tile(NamedTuple):
  block_k: int
  block_v: int
  warps: int
  stages: int = 1


_BF16 = dict(
  intra=Tile(32, 32, 8),
  scores=Tile(64, 64, 4),
  ut_fwd=Tile(64, 64, 8),
  ut_triton=Tile(64, 64, 8),
  ut_bwd=Tile(32, 32, 8),
  fwd=Tile(64, 32, 4),
  states=Tile(64, 64, 4),
  dstates=Tile(64, 32, 4),
  grads=Tile(16, 32, 8),
)
_BF16_256 = _BF16 | dict(states=Tile(64, 32, 4))
_F32 = dict(
  intra=Tile(16, 16, 8),
  scores=Tile(32, 32, 4),
  ut_fwd=Tile(16, 16, 8),
  ut_triton=Tile(32, 16, 4),
  ut_bwd=Tile(16, 16, 8),
  fwd=Tile(32, 16, 8),
  states=Tile(64, 32, 4),
  dstates=Tile(32, 16, 8),
  grads=Tile(16, 16, 4),
)
_F32_256 = _F32 | dict(states=Tile(64, 16, 4), dstates=Tile(64, 16, 4))
# (dtype, padded dk, at least 64) -> kernel -> tile. The same for every GPU: which one is not known
# when a kernel is traced.
TILES = {
  ("bfloat16", 64): _BF16,
  ("bfloat16", 128): _BF16,
  ("bfloat16", 256): _BF16_256,
  ("float32", 64): _F32,
  ("float32", 128): _F32,
  ("float32", 256): _F32_256,
}
# Six products per float32 product: at chunk 64 the backward spills kilobytes.
MAX_CHUNK = {"bfloat16": 64, "float32": 32}


def tile_for(kernel, k):
  """The tile of a kernel for keys k [B L H dk], dk a power of two."""
  return TILES[k.dtype.name, min(max(k.shape[-1], 64), 256)][kernel]
