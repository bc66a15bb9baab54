"""What a compiled program does in one call, from its HLO text; loops count as often as they run.

The compilers' own cost_analysis omits kernels and counts a loop once, and there is none for a GPU
that is not here.
"""

import collections
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
_VMEM, _COUNTERS = 1, 2  # memory spaces of a TPU; the second holds semaphores
_COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
  "collective-broadcast",
)
_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")
# Custom calls of a TPU that are names for memory, or mark what the operations around them do.
_MARKS = (
  *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"),
  *("AsyncCollectiveStart", "AsyncCollectiveDone"),
)
# They move nothing: names for memory, and what runs other operations, which are counted themselves.
_FREE = (
  *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "iota"),
  *("while", "conditional", "call", "async-start", "async-update", "partition-id"),
)
# They read a part of their first operand, as large as their result.
_PART_READ = ("dynamic-slice", "slice", "gather")
# They change a part of their first operand where it lies, as large as the operand of this number.
_PART_WRITTEN = {"dynamic-update-slice": 1, "scatter": 2}


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


@dataclasses.dataclass(frozen=True)
class Move:
  """An operation of a program, and what it moves to or from HBM, every time that it runs."""

  name: str
  source: str  # the JAX operation it comes from
  bytes: int
  kernel: str | None
  kernel_bytes: int  # of a kernel's operands and results, wherever they lie


def _bytes(shape):
  return sum(x.bytes for x in arrays(shape) if x.space != _COUNTERS)


def _padded_bytes(shape):
  return sum(x.padded_bytes for x in arrays(shape))


class Program:
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
    test, end = _root(condition), _root(body)
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

  @functools.cached_property
  def _collectives(self) -> list[tuple[str, int, int, int]]:
    """Kind, how often, bytes of the larger of operands and results, devices that take part."""
    found = {}
    for x, where, times in self.executed:
      kind = x.op.removesuffix("-start")
      if kind not in _COLLECTIVES:
        continue
      # A TPU writes a reduce-scatter as a fusion of this name, an all-reduce and a slice inside.
      kind = "reduce-scatter" if where.startswith("all-reduce-scatter") else kind
      size = max(self._ends(x, where))
      # A TPU spreads one asynchronous collective over many fusions, some of them in inner loops.
      key = x.attribute("channel_id") if "chain_id=" in x.rest else len(found)
      before = found[key][1] if key in found else times
      found[key] = (kind, min(times, before), size, _group_size(x.rest))
    return list(found.values())

  def _ends(self, collective, where):
    """Bytes of operands and of results."""
    operands = sum(_bytes(self.computations[where][y].shape) for y in collective.operands)
    # What an asynchronous start returns holds its operands too, but for an all-reduce.
    both = collective.op.endswith("-start") and collective.op != "all-reduce-start"
    return operands, _bytes(collective.shape) - (operands if both else 0)

  def collectives(self) -> dict[str, tuple[int, int]]:
    """By kind: how many each device starts, and the bytes of the larger of operands and results."""
    found = {}
    for kind, times, size, _ in sorted(self._collectives):
      count, total = found.get(kind, (0, 0))
      found[kind] = (count + times, total + times * size)
    return found

  def sent_bytes(self) -> float:
    """The least that a device sends: all but its own part, of an all-reduce twice."""
    factor = lambda kind, n: {"all-reduce": 2, "collective-permute": n / (n - 1)}.get(kind, 1)
    return sum(
      times * size * (n - 1) / n * factor(kind, n)
      for kind, times, size, n in self._collectives
      if n > 1
    )

  def product_flops(self) -> dict[str, int]:
    """Operations of all products but the kernels', by the wider dtype of their operands."""
    flops = collections.Counter()
    for x, where, times in self.executed:
      if x.op in ("dot", "convolution"):
        operands = [arrays(self.computations[where][y].shape)[0] for y in x.operands]
        depth = (_dot_depth if x.op == "dot" else _convolution_depth)(x, operands)
        dtype = max((y.dtype for y in operands), key=BITS.get)
        flops[dtype] += round(2 * times * math.prod(arrays(x.shape)[0].dims) * depth)
    return dict(flops)

  def kernels(self) -> dict[str, int]:
    """How often each kernel is called, by its name."""
    calls = collections.Counter()
    for x, _, times in self.executed:
      if x.kernel:
        calls[x.kernel] += times
    return dict(calls)

  def moves(self) -> list[Move]:
    """All that the program runs, in its order; a loop's operations as often as they run.

    Of an array that is sliced, or changed in part where it lies, the part is counted. What a kernel
    reads more than once is counted once.
    """
    found = []
    fused = {x.attribute("calls") for x, _, _ in self.executed if x.op == "fusion"}
    for x, where, times in self.executed:
      if where in fused or x.op in _FREE or x.op.endswith("-done") or x.target in _MARKS:
        continue
      everywhere = self._moved(x, where) if x.kernel else []
      in_memory = self._moved(x, where, without=_VMEM)
      source = re.search(r'op_name="([^"]*)"', x.rest)
      sizes = times * sum(in_memory), times * sum(everywhere)
      found.append(Move(x.name, source[1] if source else "", sizes[0], x.kernel, sizes[1]))
    return found

  def _moved(self, x, where, without=None) -> list[int]:
    """Bytes of what x reads and writes, but for what lies in a memory space."""
    computation = self.computations[where]
    results = arrays(x.shape)
    if x.op.removesuffix("-start") in _COLLECTIVES:
      return list(self._ends(x, where))
    if x.op.endswith("-start"):
      # The whole source and the destination, in either order: the smaller of the two is moved.
      ends = [y for y in results if y.dims]
      return [min(y.padded_bytes for y in ends)] * sum(y.space != without for y in ends)
    inside = self.computations[x.attribute("calls")] if x.op == "fusion" else computation
    root = _root(inside) if x.op == "fusion" else x
    made = root.operands if root.op == "tuple" else [root.name] * len(results)
    sizes = [
      whole.padded_bytes if part is None else part
      for whole, name in zip(results, made, strict=True)
      if whole.space != without
      for part in [self._part_written(inside, name)]
    ]
    # One buffer given twice is one buffer.
    for name in dict.fromkeys(x.operands):
      parts = [self._part_read(x, i) for i, y in enumerate(x.operands) if y == name]
      whole = sum(y.padded_bytes for y in arrays(computation[name].shape) if y.space != without)
      sizes.append(whole if None in parts else min(whole, sum(parts)))
    return sizes

  def _part_read(self, x, i) -> int | None:
    """Bytes that x reads of operand i; None if that is all of it."""
    if x.op == "fusion":
      inside = self.computations[x.attribute("calls")]
      given = {int(y.rest): name for name, y in inside.items() if y.op == "parameter"}
      return self._part_used(inside, given[i])
    if i == 0 and x.op in _PART_READ:
      return _padded_bytes(x.shape)
    return 0 if i == 0 and x.op in _PART_WRITTEN else None

  def _part_used(self, computation, name):
    """`_part_read` of all operations together that use this one."""
    total = 0
    for user in computation.values():
      for i, operand in enumerate(user.operands):
        if operand == name:
          same = user.op == "bitcast"
          part = self._part_used(computation, user.name) if same else self._part_read(user, i)
          if part is None:
            return None
          total += part
    return total

  def _part_written(self, computation, name) -> int | None:
    """Bytes that this operation writes of its result; None if that is all of it."""
    x = computation[name]
    while x.op == "bitcast":
      x = computation[x.operands[0]]
    if x.op in _PART_WRITTEN:
      return _padded_bytes(computation[x.operands[_PART_WRITTEN[x.op]]].shape)
    if x.op == "fusion":
      inside = self.computations[x.attribute("calls")]
      root = _root(inside)
      return None if root.op == "tuple" else self._part_written(inside, root.name)
    return None


def _group_size(attributes: str) -> int:
  """How many devices a collective is between, in each of XLA's three ways to write groups."""
  if mesh := re.search(r"replica_groups=\w*\[([^\]]*=[^\]]*)\] ?\{([^}]*)\}", attributes):
    sizes = {axis: int(n) for axis, n in re.findall(r"'?(\w+)'?=(\d+)", mesh[1])}
    return math.prod(sizes[axis] for axis in re.findall(r"\w+", mesh[2]))
  if shape := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
    return int(shape[1])
  if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
    return listed[1].count(",") + 1
  return 2  # pairs, as those of a permutation


def _root(computation: Computation) -> Instruction:
  return next(x for x in computation.values() if x.root)


def _source(computation, name):
  """What this is a copy of."""
  while computation[name].op in ("copy", "bitcast"):
    name = computation[name].operands[0]
  return computation[name]


def _constant(computation, name) -> int | None:
  value = _source(computation, name)
  return int(value.rest) if value.op == "constant" and value.rest.isdigit() else None


def _dot_depth(dot, operands):
  axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)[1]
  return math.prod(operands[0].dims[int(i)] for i in axes.split(",") if i)


def _convolution_depth(convolution, operands):
  """Products per number of the result, the mean over its places: padding is not multiplied."""
  lhs, rhs, _ = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.rest).groups()
  window = dict(re.findall(r"(\w+)=([\w\-]+)", _braces(convolution.rest, "window")))
  sizes = [int(x) for x in window["size"].split("x")] if window else []
  field = lambda name, default: (
    window[name].split("x") if name in window else [default] * len(sizes)
  )
  depth = operands[1].dims[rhs.index("i")]
  for i, size in enumerate(sizes):
    n = operands[0].dims[lhs.index(str(i))]
    low, high = (int(x) for x in field("pad", "0_0")[i].split("_"))
    stride, dilate, spread = (int(field(x, "1")[i]) for x in ("stride", "rhs_dilate", "lhs_dilate"))
    padded = low + (n - 1) * spread + 1 + high
    places = range(0, padded - (size - 1) * dilate, stride)
    inside = sum(
      0 <= p + k * dilate - low < (n - 1) * spread + 1 and (p + k * dilate - low) % spread == 0
      for p in places
      for k in range(size)
    )
    depth *= inside / len(places)
  return depth


def _braces(text, name):
  found = re.search(rf"\b{name}=\{{([^}}]*)\}}", text)
  return found[1] if found else ""
