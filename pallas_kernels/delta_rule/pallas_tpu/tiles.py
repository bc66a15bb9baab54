"""Tile of a TPU delta-rule program: its states, its blocks of each array, compiler parameters."""

import dataclasses
from typing import Literal

import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import bf16
from pallas_kernels.common.tiling import LANES, TPU_VMEM_LIMIT, round_up

MAX_STATES = 8  # per program, if the blocks can be tiled that way


@dataclasses.dataclass(frozen=True)
class Problem:
  """Sizes and features of a call. Head sizes are padded (`padded_size`)."""

  B: int
  L: int
  H: int  # key heads
  Hv: int  # value heads
  dk: int
  dv: int
  dtype: np.dtype
  delta_rule: bool  # False for linear attention
  gate: Literal["none", "head", "channel"]
  packed: bool  # with segment_ids


@dataclasses.dataclass(frozen=True)
class DeltaTileTPU:
  """Static description of one program: C tokens of `heads` value heads of `sequences` sequences.

  A program has one state per head and sequence, numbered u = sequence * heads + head. The work of
  one state hides the matmul latency of the others.
  """

  chunk: int
  sequences: int  # batch elements per program
  heads: int  # value heads per program
  key_heads: int  # key heads per program
  ratio: int  # value heads per key head
  dk: int
  dv: int
  delta_rule: bool  # False for linear attention, which has no correction term
  gate_rows: int  # rows of cumulative per-head log decays: 0, 1, or 2 (coarse and fine part)
  per_channel: bool  # one gate per key channel
  packed: bool
  scale: float
  inverse_precision: str
  base: int = 16  # size of the diagonal blocks inverted by substitution

  @property
  def states(self) -> int:
    return self.sequences * self.heads

  @property
  def key_count(self) -> int:
    """Key heads of all sequences."""
    return self.sequences * self.key_heads

  @property
  def row_count(self) -> int:
    """Rows of beta, cumulative log decays and segment numbers."""
    return self.states * (self.delta_rule + self.gate_rows) + self.sequences * self.packed

  @property
  def name(self) -> str:
    return "delta_rule" if self.delta_rule else "linear_attention"

  def key_of(self, u: int) -> int:
    """Return the key head of state u, numbered over all sequences."""
    b, h = divmod(u, self.heads)
    return b * self.key_heads + (h // self.ratio if self.key_heads > 1 else 0)

  def value_slice(self, u: int) -> tuple:
    """Return the index of state u's values in a block [sequences, C, heads*dv]."""
    b, h = divmod(u, self.heads)
    return b, slice(None), slice(h * self.dv, (h + 1) * self.dv)

  def key_slice(self, i: int) -> tuple:
    """Return the index of key head i in a block [sequences, C, key_heads*dk]."""
    b, h = divmod(i, self.key_heads)
    return b, slice(None), slice(h * self.dk, (h + 1) * self.dk)

  def gate_slice(self, u: int) -> tuple:
    """Return the index of state u's per-channel gates in a block [sequences, C, heads*dk]."""
    b, h = divmod(u, self.heads)
    return b, slice(None), slice(h * self.dk, (h + 1) * self.dk)

  def state_index(self, u: int) -> tuple:
    """Return the index of state u in a block [sequences, heads, ...]."""
    return divmod(u, self.heads)


def _power_of_two(n):
  return 1 << max(n - 1, 0).bit_length()


def padded_size(d):
  """Return the padded size of a head of d channels."""
  # Slices of a block start at multiples of the head size: it must divide 128 or be a multiple.
  return _power_of_two(max(d, 16)) if d <= LANES else round_up(d, LANES)


def choose_tile(p: Problem, *, scale, chunk, inverse_precision) -> DeltaTileTPU:
  """Return the tile with the most states that a program can hold, preferring heads to sequences."""
  if chunk is None:
    chunk = 128
  if chunk < 16 or chunk != _power_of_two(chunk):
    raise ValueError(f"chunk is {chunk}, expected a power of two >= 16.")
  chunk = min(chunk, _power_of_two(max(p.L, 16)))
  precision = bf16.inverse_precision(inverse_precision, p.dtype)
  ratio = p.Hv // p.H
  # float32 and large heads each take twice the VMEM per head.
  limit = max(1, MAX_STATES * LANES * 2 // (max(p.dk, p.dv, LANES) * p.dtype.itemsize))

  def fits(G):
    if p.Hv % G or (G % ratio and ratio % G):
      return False
    key_heads = max(G // ratio, 1)
    keys = key_heads * p.dk % LANES == 0 or (key_heads == p.H and ratio <= G)
    gates = p.gate != "channel" or G * p.dk % LANES == 0 or p.Hv == G
    return keys and gates and (G * p.dv % LANES == 0 or p.Hv == G)

  sizes = [G for G in range(1, p.Hv + 1) if fits(G)]
  sequences = [n for n in range(1, min(p.B, limit) + 1) if p.B % n == 0]
  tiles = [(n * G, G) for G in sizes for n in sequences if n * G <= limit]
  states, heads = max(tiles, default=(sizes[0], sizes[0]))
  if 2 * states <= limit:
    # Slightly more states than the limit are better than less than half of it.
    states, heads = min([(G, G) for G in sizes if limit < G <= 2 * limit], default=(states, heads))
  return DeltaTileTPU(
    chunk=chunk,
    sequences=states // heads,
    heads=heads,
    key_heads=max(heads // ratio, 1),
    ratio=ratio,
    dk=p.dk,
    dv=p.dv,
    delta_rule=p.delta_rule,
    gate_rows=(2 if p.dtype.itemsize == 4 else 1) if p.gate == "head" else 0,
    per_channel=p.gate == "channel",
    packed=p.packed,
    scale=scale,
    inverse_precision=precision,
    base=chunk if precision == "substitution" else 16,
  )


def block_specs(tile, last=None):
  """Return the block specs by kind of array; with `last`, chunks run from `last` to 0."""
  C, M, G, dk, dv = tile.chunk, tile.sequences, tile.heads, tile.dk, tile.dv
  share = max(tile.ratio // G, 1)  # programs that read one key head
  at = (lambda n: n) if last is None else (lambda n: last - n)
  # full_like: a Python int would be 64-bit with jax_enable_x64.
  key = lambda j: lax.div(j, lax.full_like(j, share))
  return dict(
    key=pl.BlockSpec((M, C, tile.key_heads * dk), lambda b, j, n: (b, at(n), key(j))),
    dkey=pl.BlockSpec((M, C, tile.key_heads * dk), lambda b, j, n: (b, at(n), j)),
    value=pl.BlockSpec((M, C, G * dv), lambda b, j, n: (b, at(n), j)),
    gate=pl.BlockSpec((M, C, G * dk), lambda b, j, n: (b, at(n), j)),
    rows=pl.BlockSpec((None, None, None, tile.row_count, C), lambda b, j, n: (b, at(n), j, 0, 0)),
    state=pl.BlockSpec((M, G, dk, dv), lambda b, j, n: (b, j, 0, 0)),
    X=pl.BlockSpec((M, None, G, C, C), lambda b, j, n: (b, at(n), j, 0, 0)),
    states=pl.BlockSpec((M, None, G, dk, dv), lambda b, j, n: (b, at(n), j, 0, 0)),
  )


def compiler_params():
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=TPU_VMEM_LIMIT
  )
