"""Tiles of the TPU kernels: the heads and rows a program takes, and its blocks of each array."""

import dataclasses

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import bf16
from pallas_kernels.common.tiling import LANES, TPU_VMEM_LIMIT, round_up

MAX_STATES = 8  # per program, where the blocks can be tiled so


@dataclasses.dataclass(frozen=True)
class DeltaTileTPU:
  """Static description of one program: C tokens of `heads` value heads of `sequences` batch rows.

  A program has a state for each head of each sequence, numbered u = sequence * heads + head. What
  is done for one of them waits for its products; the others fill that time.
  """

  chunk: int
  sequences: int
  heads: int  # value heads per program
  key_heads: int  # key heads per program
  ratio: int  # value heads per key head
  dk: int
  dv: int
  delta_rule: bool  # the delta rule; linear attention only writes
  gates: int  # rows of cumulative log decays per head: none, one, or a coarse and a fine one
  channels: bool  # a gate for each key channel
  packed: bool
  scale: float
  inverse_precision: str
  base: int = 16  # size of the diagonal blocks inverted by substitution

  @property
  def states(self) -> int:
    return self.sequences * self.heads

  @property
  def keys(self) -> int:
    return self.sequences * self.key_heads

  @property
  def rows(self) -> int:
    return self.states * (self.delta_rule + self.gates) + self.sequences * self.packed

  @property
  def name(self) -> str:
    return "delta_rule" if self.delta_rule else "linear_attention"

  def key(self, u: int) -> int:
    """The number of state u's keys among those of all sequences."""
    b, h = divmod(u, self.heads)
    return b * self.key_heads + (h // self.ratio if self.key_heads > 1 else 0)

  def values_at(self, u: int) -> tuple:
    """Where the values of state u are in a block [sequences, C, heads*dv]."""
    b, h = divmod(u, self.heads)
    return b, slice(None), slice(h * self.dv, (h + 1) * self.dv)

  def keys_at(self, i: int) -> tuple:
    """Where keys number i are in a block [sequences, C, key_heads*dk]."""
    b, h = divmod(i, self.key_heads)
    return b, slice(None), slice(h * self.dk, (h + 1) * self.dk)

  def gates_at(self, u: int) -> tuple:
    """Where the gates of state u are in a block [sequences, C, heads*dk]."""
    b, h = divmod(u, self.heads)
    return b, slice(None), slice(h * self.dk, (h + 1) * self.dk)

  def state_at(self, u: int) -> tuple:
    """Where state u is in a block [sequences, heads, ...]."""
    return divmod(u, self.heads)


def _power_of_two(n):
  return 1 << max(n - 1, 0).bit_length()


def padded_size(d):
  """Channels of a head of d, with the zeros that fill its tile."""
  # Slices of a block start at multiples of the head size; these sizes are whole parts of 128 lanes.
  return _power_of_two(max(d, 16)) if d <= LANES else round_up(d, LANES)


def choose_tile(
  B, L, H, Hv, dk, dv, dtype, *, delta_rule, gate, packed, scale, chunk, inverse_precision
):
  """Tile of a problem: as many states as a program can hold, of many heads rather than rows.

  Args:
    gate: "none", "head" or "channel".
  """
  if chunk is None:
    chunk = 128
  if chunk < 16 or chunk != _power_of_two(chunk):
    raise ValueError(f"chunk must be a power of two >= 16, got {chunk}")
  chunk = min(chunk, _power_of_two(max(L, 16)))
  precision = bf16.inverse_precision(inverse_precision, dtype)
  ratio = Hv // H
  # float32 and wide heads hold twice the VMEM per head each.
  limit = max(1, MAX_STATES * LANES * 2 // (max(dk, dv, LANES) * dtype.itemsize))

  def fits(G):
    if Hv % G or (G % ratio and ratio % G):
      return False
    key_heads = max(G // ratio, 1)
    keys = key_heads * dk % LANES == 0 or (key_heads == H and ratio <= G)
    gates = gate != "channel" or G * dk % LANES == 0 or Hv == G
    return keys and gates and (G * dv % LANES == 0 or Hv == G)

  sizes = [G for G in range(1, Hv + 1) if fits(G)]
  rows = [n for n in range(1, min(B, limit) + 1) if B % n == 0]
  tiles = [(n * G, G) for G in sizes for n in rows if n * G <= limit]
  states, heads = max(tiles, default=(sizes[0], sizes[0]))
  if 2 * states <= limit:
    # A few more than the limit are better than so few.
    states, heads = min([(G, G) for G in sizes if limit < G <= 2 * limit], default=(states, heads))
  return DeltaTileTPU(
    chunk=chunk,
    sequences=states // heads,
    heads=heads,
    key_heads=max(heads // ratio, 1),
    ratio=ratio,
    dk=dk,
    dv=dv,
    delta_rule=delta_rule,
    gates=(2 if dtype.itemsize == 4 else 1) if gate == "head" else 0,
    channels=gate == "channel",
    packed=packed,
    scale=scale,
    inverse_precision=precision,
    base=chunk if precision == "substitution" else 16,
  )


def block_specs(tile, last=None):
  """Specs of keys, values, rows, states and per-chunk matrices; `last` chunk first if it is set."""
  C, M, G, dk, dv = tile.chunk, tile.sequences, tile.heads, tile.dk, tile.dv
  share = max(tile.ratio // G, 1)  # programs that read one key head
  at = (lambda n: n) if last is None else (lambda n: last - n)
  # A plain `share` would be a 64-bit number where jax_enable_x64 is set.
  key = lambda j: lax.div(j, lax.full_like(j, share))
  return dict(
    key=pl.BlockSpec((M, C, tile.key_heads * dk), lambda b, j, n: (b, at(n), key(j))),
    dkey=pl.BlockSpec((M, C, tile.key_heads * dk), lambda b, j, n: (b, at(n), j)),
    value=pl.BlockSpec((M, C, G * dv), lambda b, j, n: (b, at(n), j)),
    gate=pl.BlockSpec((M, C, G * dk), lambda b, j, n: (b, at(n), j)),
    rows=pl.BlockSpec((None, None, None, tile.rows, C), lambda b, j, n: (b, at(n), j, 0, 0)),
    state=pl.BlockSpec((M, G, dk, dv), lambda b, j, n: (b, j, 0, 0)),
    X=pl.BlockSpec((M, None, G, C, C), lambda b, j, n: (b, at(n), j, 0, 0)),
    states=pl.BlockSpec((M, None, G, dk, dv), lambda b, j, n: (b, at(n), j, 0, 0)),
  )


def compiler_params():
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=TPU_VMEM_LIMIT
  )
