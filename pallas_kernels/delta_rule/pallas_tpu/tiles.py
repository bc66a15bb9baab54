"""Tiles of the TPU kernels: the heads a program takes, and the blocks it sees of each array."""

import dataclasses

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import bf16
from pallas_kernels.tiling import LANES, TPU_VMEM_LIMIT, round_up

MAX_HEADS = 8  # value heads per program; more only where the lanes of a block ask for it


@dataclasses.dataclass(frozen=True)
class Tile:
  """Static description of one program: C tokens of `heads` value heads and their key heads."""

  chunk: int
  heads: int  # value heads per program
  key_heads: int  # key heads per program
  ratio: int  # value heads per key head
  dk: int
  dv: int
  gated: bool
  packed: bool
  scale: float
  inverse_precision: str
  base: int = 16  # size of the diagonal blocks inverted by substitution

  @property
  def rows(self) -> int:
    return self.heads * (1 + 2 * self.gated) + self.packed

  def key_head(self, h: int) -> int:
    return h // self.ratio if self.key_heads > 1 else 0


def _power_of_two(n):
  return 1 << max(n - 1, 0).bit_length()


def padded_size(d):
  """Channels of a head of d, with the zeros that fill its tile."""
  # Slices of a block start at multiples of the head size; these sizes are whole parts of 128 lanes.
  return _power_of_two(max(d, 16)) if d <= LANES else round_up(d, LANES)


def choose_tile(L, H, Hv, dk, dv, dtype, *, gated, packed, scale, chunk, inverse_precision):
  """Tile of a problem: the largest group of at most MAX_HEADS heads whose blocks can be tiled."""
  if chunk is None:
    chunk = 128
  if chunk < 16 or chunk != _power_of_two(chunk):
    raise ValueError(f"chunk must be a power of two >= 16, got {chunk}")
  chunk = min(chunk, _power_of_two(max(L, 16)))
  precision = bf16.inverse_precision(inverse_precision, dtype)
  ratio = Hv // H
  # float32 and wide heads hold twice the VMEM per head each.
  limit = max(1, MAX_HEADS * LANES * 2 // (max(dk, dv, LANES) * dtype.itemsize))

  def fits(G):
    if Hv % G or (G % ratio and ratio % G):
      return False
    key_heads = max(G // ratio, 1)
    keys = key_heads * dk % LANES == 0 or (key_heads == H and ratio <= G)
    return keys and (G * dv % LANES == 0 or Hv == G)

  sizes = [G for G in range(1, Hv + 1) if fits(G)]
  heads = max([G for G in sizes if limit >= G], default=sizes[0])
  return Tile(
    chunk=chunk,
    heads=heads,
    key_heads=max(heads // ratio, 1),
    ratio=ratio,
    dk=dk,
    dv=dv,
    gated=gated,
    packed=packed,
    scale=scale,
    inverse_precision=precision,
    base=chunk if precision == "substitution" else 16,
  )


def block_specs(tile, last=None):
  """Specs of keys, values, rows, states and per-chunk matrices; `last` chunk first if it is set."""
  C, G, dk, dv = tile.chunk, tile.heads, tile.dk, tile.dv
  share = max(tile.ratio // G, 1)  # programs that read one key head
  at = (lambda n: n) if last is None else (lambda n: last - n)
  # A plain `share` would be a 64-bit number where jax_enable_x64 is set.
  key = lambda j: lax.div(j, lax.full_like(j, share))
  return dict(
    key=pl.BlockSpec((None, C, tile.key_heads * dk), lambda b, j, n: (b, at(n), key(j))),
    dkey=pl.BlockSpec((None, C, tile.key_heads * dk), lambda b, j, n: (b, at(n), j)),
    value=pl.BlockSpec((None, C, G * dv), lambda b, j, n: (b, at(n), j)),
    rows=pl.BlockSpec((None, None, None, tile.rows, C), lambda b, j, n: (b, at(n), j, 0, 0)),
    state=pl.BlockSpec((None, G, dk, dv), lambda b, j, n: (b, j, 0, 0)),
    X=pl.BlockSpec((None, None, G, C, C), lambda b, j, n: (b, at(n), j, 0, 0)),
    states=pl.BlockSpec((None, None, G, dk, dv), lambda b, j, n: (b, at(n), j, 0, 0)),
  )


def compiler_params():
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=TPU_VMEM_LIMIT
  )
