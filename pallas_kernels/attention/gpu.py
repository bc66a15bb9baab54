"""Causal attention on NVIDIA GPUs: tiles of each chip, and rows padded to them."""

from typing import NamedTuple

from pallas_kernels.attention import gpu_kernels
from pallas_kernels.attention.checks import check_inputs
from pallas_kernels.attention.mask_ranges import first_keys, last_queries
from pallas_kernels.attention.vjp import attend
from pallas_kernels.common import gpu
from pallas_kernels.common.platform import only_on
from pallas_kernels.common.tiling import pad_axis, round_up


class Tile(NamedTuple):
  own: int  # tokens of a program
  step: int  # of the other side that it takes at a time
  warps: int
  stages: int = 1  # of a loop's loads that are in flight at once; 1 loads nothing ahead


# By padded head size, 64 at least, chosen by compiling for each chip (`../README.md`, Attention).
# GPUs without a table of their own: nothing is loaded ahead, 48 KiB of shared memory at most.
OTHER = {
  64: dict(fwd=Tile(128, 64, 4), bwd=Tile(64, 32, 4)),
  128: dict(fwd=Tile(128, 64, 8), bwd=Tile(32, 32, 4)),
}
# Registers and blocks per core, no spills: 124 and 2, 218 and 2; 226 and 1, 255 and 1.
H100 = {
  64: dict(fwd=Tile(128, 64, 8, 2), bwd=Tile(64, 64, 4, 2)),
  128: dict(fwd=Tile(128, 128, 8, 2), bwd=Tile(128, 64, 8, 2)),
}
# 254 and 2, 222 and 2; 231 and 1, 243 and 1.
A100 = {
  64: dict(fwd=Tile(128, 64, 4, 2), bwd=Tile(64, 32, 4, 2)),
  128: dict(fwd=Tile(128, 64, 8, 2), bwd=Tile(64, 64, 8, 2)),
}
# 123 and 2, 167 and 1; 252 and 1, 199 and 1. Products are of 128 rows, or at half the rate.
B200 = {
  64: dict(fwd=Tile(128, 64, 8, 2), bwd=Tile(128, 64, 8, 2)),
  128: dict(fwd=Tile(128, 128, 8, 2), bwd=Tile(128, 64, 8, 2)),
}
# By a part of the name that jax gives a GPU.
TILES = {"A100": A100, "H100": H100, "H200": H100, "B200": B200}


def _power_of_two(size):
  return max(16, 1 << (size - 1).bit_length())


def tile_for(kernel: str, length: int, head_size: int) -> Tile:
  """The tile of "fwd" or "bwd" on the GPU that is compiled for, no longer than rows need."""
  kind = gpu.device_kind() or ""
  table = next((table for name, table in TILES.items() if name in kind), OTHER)
  tile = table[max(64, _power_of_two(head_size))][kernel]
  most = _power_of_two(length)
  return tile._replace(own=min(tile.own, most), step=min(tile.step, most))


def attention_gpu(q, k, v, segments=None, *, window=None, interpret=False):
  """softmax(q k^T / sqrt(d)) v over the tokens of the same segment up to the current one.

  Args:
    q: [B, L, H, d] bfloat16 or float16; k, v: [B, L, Hk, d], Hk a divisor of H.
    segments: [B, L] int32, ascending, or None.
    window: how many keys a token sees, its own included; None is all.
  """
  check_inputs("pallas_gpu", q, k, v)
  L, d = q.shape[1], q.shape[3]
  size = _power_of_two(d)
  tiles = {kernel: tile_for(kernel, L, d) for kernel in ("fwd", "bwd")}
  Lp = round_up(L, max(tile.own for tile in tiles.values()))
  # Padded tokens come last: no query that counts sees them.
  pad = lambda x: pad_axis(pad_axis(x, 1, Lp), 3, size)
  take = lambda x: x[:, :L, :, :d]
  options = dict(scale=d**-0.5, interpret=interpret)

  def forward(q, k, v, segments, save):
    first = first_keys(segments, q.shape[0], Lp, window)
    o, sums = gpu_kernels.forward(
      pad(q), pad(k), pad(v), first, tile=tiles["fwd"], save=save, **options
    )
    return take(o), sums

  def backward(q, k, v, segments, o, sums, do):
    first = first_keys(segments, q.shape[0], Lp, window)
    last = last_queries(segments, q.shape[0], Lp, window)
    grads = gpu_kernels.backward(
      pad(q), pad(k), pad(v), first, last, pad(o), sums, pad(do), tile=tiles["bwd"], **options
    )
    return [take(x) for x in grads]

  q = q if interpret else only_on(q, "cuda", "attention_gpu")
  return attend(forward, backward, q, k, v, segments, window)
