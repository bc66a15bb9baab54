"""Bytes that a compiled program moves, from its HLO text: cost_analysis omits custom calls."""

import dataclasses
import re

import numpy as np

_BITS = dict(bf16=16, f16=16, f32=32, f64=64, s8=8, u8=8, s32=32, u32=32, s64=64, u64=64, pred=8)


def _bytes(shapes: str, on_chip: bool = True) -> int:
  """Bytes of all arrays in a piece of HLO text, padded to their tiles as TPU memory holds them.

  on_chip: count arrays in a TPU's VMEM, memory space 1, too.
  """
  total = 0
  for dtype, dims, order, tiling in re.findall(
    r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?", shapes
  ):
    if dtype not in _BITS or ("S(1)" in tiling and not on_chip):
      continue
    sizes = [int(x) for x in dims.split(",") if x]
    if tile := re.match(r"T\(([\d,]+)\)", tiling):
      for axis, size in zip(order.split(","), reversed(tile[1].split(","))):
        if axis:
          sizes[int(axis)] = -(-sizes[int(axis)] // int(size)) * int(size)
    total += int(np.prod(sizes, dtype=np.int64)) * _BITS[dtype] // 8
  return total


# They move nothing: names for memory, or the end of a copy counted where it starts.
_FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "iota")


@dataclasses.dataclass(frozen=True)
class Move:
  """An operation of a program, outside of loops, and what it moves to or from HBM."""

  name: str
  result: str  # its shape in HLO
  source: str  # the JAX operation it comes from
  bytes: int
  kernel: str | None
  kernel_bytes: int  # of a kernel's operands and results, wherever they lie


def moves(hlo: str) -> list[Move]:
  """All that the program's entry runs, in its order."""
  entry = hlo[hlo.index("\nENTRY") :]
  shapes, found = {}, []
  for name, shape, op, operands, rest in re.findall(
    r"^ *(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$", entry, re.M
  ):
    shapes[name] = shape
    if op in _FREE or op.endswith("-done"):
      continue
    # One buffer given twice is one buffer.
    inputs = " ".join(
      shapes.get(x, "") for x in dict.fromkeys(re.findall(r"%([\w.\-]+)", operands))
    )
    if op.endswith("-start"):
      # The whole source and the destination, in either order: the smaller of the two is moved.
      ends = re.findall(r"\w+\[[\d,]+\]\{[^}]*\}", shape)
      size = min(map(_bytes, ends)) * sum("S(1)" not in x for x in ends)
    else:
      size = _bytes(inputs, on_chip=False) + _bytes(shape, on_chip=False)
    kernel = _kernel_name(rest) if op == "custom-call" else None
    source = re.search(r'op_name="([^"]*)"', rest)
    everywhere = _bytes(inputs) + _bytes(shape) if kernel else 0
    found.append(Move(name, shape, source[1] if source else "", size, kernel, everywhere))
  return found


def hbm_bytes(hlo: str) -> tuple[dict[str, int], int]:
  """Bytes of every kernel's operands and results, and of all the program moves to or from HBM."""
  found = moves(hlo)
  return {x.kernel: x.kernel_bytes for x in found if x.kernel}, sum(x.bytes for x in found)


def _kernel_name(attributes):
  if named := re.search(r'op_name="[^"]*?(\w+)\)*/pallas_call', attributes):
    return named[1]
  return "jax_triton" if 'custom_call_target="triton_kernel_call"' in attributes else None
