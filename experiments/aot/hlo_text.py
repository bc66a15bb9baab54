"""The text of a compiled program: shapes, operations, and how often each of them runs."""

import dataclasses
import functools
import math
import re

_WIDTHS = {  # bits in memory: dtypes
  2: "s2 u2",
  4: "s4 u4 f4e2m1fn",
  8: "pred s8 u8 f8e3m4 f8e4m3 f8e4m3b11fnuz f8e4m3fn f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu",
  16: "s16 u16 f16 bf16",
  32: "s32 u32 f32",
  64: "s64 u64 f64 c64",
  128: "c128",
}
BITS = {dtype: bits for bits, dtypes in _WIDTHS.items() for dtype in dtypes.split()}
_NO_ARRAYS = ("token", "opaque")
VMEM, COUNTERS = 1, 2  # memory spaces of a TPU; the second holds semaphores
_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of an HLO shape, `bf16[4,64]{1,0:T(8,128)(2,1)S(1)}`."""

  dtype: str
  dims: tuple[int, ...]
  padded_dims: tuple[int, ...]  # to tiles, as a TPU's memory holds it
  space: int

  @property
  def bytes(self) -> int:
    return math.prod(self.dims) * BITS[self.dtype] // 8

  @property
  def padded_bytes(self) -> int:
    return math.prod(self.padded_dims) * BITS[self.dtype] // 8


def arrays(shape: str) -> list[Array]:
  """The arrays of a shape, those of a tuple one by one; ValueError names an unknown dtype."""
  found = []
  for dtype, dims, order, layout in re.findall(
    r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?", shape
  ):
    if dtype in _NO_ARRAYS:
      continue
    if dtype not in BITS:
      raise ValueError(f"the HLO shape {shape} has a dtype of unknown width, {dtype!r}.")
    dims = tuple(int(x) for x in dims.split(",") if x)
    padded = list(dims)
    if tile := re.match(r"T\(([\d,]+)\)", layout):
      for axis, size in zip(order.split(","), reversed(tile[1].split(","))):
        if axis:
          padded[int(axis)] = -(-padded[int(axis)] // int(size)) * int(size)
    space = re.search(r"S\((\d+)\)", layout)
    found.append(Array(dtype, dims, tuple(padded), int(space[1]) if space else 0))
  return found


@dataclasses.dataclass(frozen=True)
class Instruction:
  name: str
  shape: str
  op: str
  operands: tuple[str, ...]
  rest: str  # attributes; of a constant its value, of a parameter its number
  root: bool

  def attribute(self, name: str) -> str | None:
    found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
    return found and found[1]

  @property
  def target(self) -> str | None:
    """What a custom call calls."""
    found = re.search(r'custom_call_target="([^"]*)"', self.rest)
    return found[1] if found and self.op == "custom-call" else None

  @property
  def kernel(self) -> str | None:
    """The name of the kernel that this calls; of one not written in Pallas, its kind."""
    target = self.target
    if target not in _KERNELS:
      return None
    if name := re.search(r'op_name="[^"]*?(\w+)\)*/pallas_call', self.rest):
      return name[1]
    # A TPU's compiler may lose where a kernel comes from, but names the call after it.
    return re.sub(r"[.\d]*$", "", self.name) if target == "tpu_custom_call" else target


Computation = dict[str, Instruction]


class Text:
  """A parsed HLO module; `unknown` names the loops whose number of rounds was not found."""

  def __init__(self, hlo: str):
    self.computations: dict[str, Computation] = {}
    self.unknown: set[str] = set()
    for line in hlo.split("\n"):
      if head := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
        here = self.computations[head[2]] = {}
        if head[1]:
          self.entry = head[2]
      elif m := re.match(r" +(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$", line):
        root, name, shape, op, inside, rest = m.groups()
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
        # Of a constant its value, of a parameter its number.
        rest = inside if op in ("constant", "parameter") else rest
        here[name] = Instruction(name, shape, op, operands, rest, bool(root))

  @functools.cached_property
  def executed(self) -> list[tuple[Instruction, str, int]]:
    """Every instruction, the name of its computation, and how often it runs."""
    found = []

    def walk(name, times):
      computation = self.computations[name]
      for x in computation.values():
        found.append((x, name, times))
        if x.op == "while":
          walk(x.attribute("body"), times * self._trips(x, computation))
        elif x.op == "conditional":
          # Which one runs is not known here: all are counted, so this is an upper bound.
          branches = re.search(r"branch_computations=\{([^}]*)\}", x.rest)
          names = re.findall(r"%([\w.\-]+)", branches[1]) if branches else []
          names += [x.attribute(f"{w}_computation") for w in ("true", "false") if not branches]
          for branch in names:
            walk(branch, times)
        elif called := x.attribute("calls") or (x.op == "call" and x.attribute("to_apply")):
          walk(called, times)

    walk(self.entry, 1)
    return found

  def _trips(self, loop, around) -> int:
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
      return int(known[1])
    condition, body = (self.computations[loop.attribute(x)] for x in ("condition", "body"))
    test, end = root(condition), root(body)
    # `i < limit`, where i is one of the loop's values, starts at a constant and grows by another.
    if test.op == "compare" and test.attribute("direction") == "LT":
      counter, limit = (condition[x] for x in test.operands)
      start = around[loop.operands[0]]
      if counter.op == "get-tuple-element" and start.op == end.op == "tuple":
        i = int(counter.attribute("index"))
        first, limit = _constant(around, start.operands[i]), _constant(condition, limit.name)
        update = _source(body, end.operands[i])
        steps = [_constant(body, x) for x in update.operands] if update.op == "add" else []
        steps = [x for x in steps if x]
        if first is not None and limit is not None and steps:
          return math.ceil((limit - first) / steps[0])
    self.unknown.add(loop.name)
    return 1


def root(computation: Computation) -> Instruction:
  return next(x for x in computation.values() if x.root)


def _source(computation, name):
  """What this is a copy of."""
  while computation[name].op in ("copy", "bitcast"):
    name = computation[name].operands[0]
  return computation[name]


def _constant(computation, name) -> int | None:
  value = _source(computation, name)
  return int(value.rest) if value.op == "constant" and value.rest.isdigit() else None
