"""Static analysis of a compiled program from its optimized HLO text.

Parses shapes, instructions and loop trip counts, and derives per call: matmul FLOPs, HBM traffic,
collective bytes and kernel calls. Loop bodies count once per iteration.

XLA's own `cost_analysis` omits custom calls (kernels), counts a loop body once, and is not
available for a GPU topology without a device.
"""

import collections
import dataclasses
import functools
import math
import re

_DTYPES_BY_BITS = {
  2: "s2 u2",
  4: "s4 u4 f4e2m1fn",
  8: "pred s8 u8 f8e3m4 f8e4m3 f8e4m3b11fnuz f8e4m3fn f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0fnu",
  16: "s16 u16 f16 bf16",
  32: "s32 u32 f32",
  64: "s64 u64 f64 c64",
  128: "c128",
}
_BITS = {dtype: bits for bits, dtypes in _DTYPES_BY_BITS.items() for dtype in dtypes.split()}
_NON_ARRAYS = ("token", "opaque")
_VMEM, _SEMAPHORES = 1, 2  # TPU memory spaces, S(n) in a layout; HBM is 0
_KERNEL_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")
_COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
  "collective-broadcast",
)
# TPU custom calls that only name a buffer or annotate the surrounding instructions.
_ANNOTATIONS = (
  *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"),
  *("AsyncCollectiveStart", "AsyncCollectiveDone"),
)
# Instructions without HBM traffic of their own: aliases, and control flow whose body is counted.
_FREE = (
  *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "iota"),
  *("while", "conditional", "call", "async-start", "async-update", "partition-id"),
)
# They read only a slice of operand 0, as large as their result.
_SLICE_READS = ("dynamic-slice", "slice", "gather")
# They update operand 0 in place -> index of the operand that has the size of the updated slice.
_IN_PLACE_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


@dataclasses.dataclass(frozen=True)
class HloArray:
  """One array of an HLO shape, `bf16[4,64]{1,0:T(8,128)(2,1)S(1)}`."""

  dtype: str
  dims: tuple[int, ...]
  padded_dims: tuple[int, ...]  # rounded up to TPU tiles
  space: int  # memory space

  @property
  def bytes(self) -> int:
    return math.prod(self.dims) * _BITS[self.dtype] // 8

  @property
  def padded_bytes(self) -> int:
    return math.prod(self.padded_dims) * _BITS[self.dtype] // 8


def arrays(shape: str) -> list[HloArray]:
  """Parse an HLO shape; a tuple gives all its arrays.

  Raises:
    ValueError: a dtype is unknown.
  """
  found = []
  for dtype, dims, order, layout in re.findall(
    r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?", shape
  ):
    if dtype in _NON_ARRAYS:
      continue
    if dtype not in _BITS:
      raise ValueError(f"HLO shape {shape} has a dtype of unknown width, {dtype!r}.")
    dims = tuple(int(x) for x in dims.split(",") if x)
    padded = list(dims)
    if tile := re.match(r"T\(([\d,]+)\)", layout):
      for axis, size in zip(order.split(","), reversed(tile[1].split(","))):
        if axis:
          padded[int(axis)] = -(-padded[int(axis)] // int(size)) * int(size)
    space = re.search(r"S\((\d+)\)", layout)
    found.append(HloArray(dtype, dims, tuple(padded), int(space[1]) if space else 0))
  return found


@dataclasses.dataclass(frozen=True)
class Instruction:
  name: str
  shape: str
  op: str
  operands: tuple[str, ...]
  rest: str  # attributes; the value of a constant, the index of a parameter
  root: bool

  def attribute(self, name: str) -> str | None:
    found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
    return found and found[1]

  @property
  def target(self) -> str | None:
    """The `custom_call_target` of a custom call."""
    found = re.search(r'custom_call_target="([^"]*)"', self.rest)
    return found[1] if found and self.op == "custom-call" else None

  @property
  def kernel(self) -> str | None:
    """Name of the kernel that this instruction launches; for non-Pallas kernels, the target."""
    target = self.target
    if target not in _KERNEL_TARGETS:
      return None
    if name := re.search(r'op_name="[^"]*?(\w+)\)*/pallas_call', self.rest):
      return name[1]
    # The TPU compiler may drop op_name, but names the instruction after the kernel.
    return re.sub(r"[.\d]*$", "", self.name) if target == "tpu_custom_call" else target


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Move:
  """HBM traffic of one instruction, summed over all its executions."""

  name: str
  source: str  # op_name: the JAX operation it comes from
  bytes: int
  kernel: str | None
  kernel_bytes: int  # operands and results of a kernel, in any memory space


class HloModule:
  """A parsed HLO module.

  Attributes:
    computations: instructions by computation and name.
    unknown_trip_counts: names of while loops whose trip count was not found; their bodies count
      once.
  """

  def __init__(self, hlo: str):
    self.computations: dict[str, Computation] = {}
    self.unknown_trip_counts: set[str] = set()
    for line in hlo.split("\n"):
      if head := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
        computation = self.computations[head[2]] = {}
        if head[1]:
          self.entry = head[2]
      elif m := re.match(r" +(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$", line):
        root, name, shape, op, inside, rest = m.groups()
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
        rest = inside if op in ("constant", "parameter") else rest
        computation[name] = Instruction(name, shape, op, operands, rest, bool(root))

  @functools.cached_property
  def executed(self) -> list[tuple[Instruction, str, int]]:
    """(instruction, name of its computation, number of executions) in program order."""
    found = []

    def walk(name, times):
      computation = self.computations[name]
      for x in computation.values():
        found.append((x, name, times))
        if x.op == "while":
          walk(x.attribute("body"), times * self._trip_count(x, computation))
        elif x.op == "conditional":
          # The branch taken is unknown: count all of them, an upper bound.
          branches = re.search(r"branch_computations=\{([^}]*)\}", x.rest)
          names = re.findall(r"%([\w.\-]+)", branches[1]) if branches else []
          names += [x.attribute(f"{w}_computation") for w in ("true", "false") if not branches]
          for branch in names:
            walk(branch, times)
        elif called := x.attribute("calls") or (x.op == "call" and x.attribute("to_apply")):
          walk(called, times)

    walk(self.entry, 1)
    return found

  def _trip_count(self, loop, parent) -> int:
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
      return int(known[1])
    condition, body = (self.computations[loop.attribute(x)] for x in ("condition", "body"))
    test, end = _root(condition), _root(body)
    # `i < limit`: i is an element of the loop state with constant initial value and increment.
    if test.op == "compare" and test.attribute("direction") == "LT":
      counter, limit = (condition[x] for x in test.operands)
      start = parent[loop.operands[0]]
      if counter.op == "get-tuple-element" and start.op == end.op == "tuple":
        i = int(counter.attribute("index"))
        first, limit = _constant(parent, start.operands[i]), _constant(condition, limit.name)
        update = _source(body, end.operands[i])
        steps = [_constant(body, x) for x in update.operands] if update.op == "add" else []
        steps = [x for x in steps if x]
        if first is not None and limit is not None and steps:
          return math.ceil((limit - first) / steps[0])
    self.unknown_trip_counts.add(loop.name)
    return 1

  def matmul_flops(self) -> dict[str, int]:
    """FLOPs of all dots and convolutions outside kernels, by the wider operand dtype."""
    flops = collections.Counter()
    for x, where, times in self.executed:
      if x.op in ("dot", "convolution"):
        operands = [arrays(self.computations[where][y].shape)[0] for y in x.operands]
        depth = (_dot_depth if x.op == "dot" else _convolution_depth)(x, operands)
        dtype = max((y.dtype for y in operands), key=_BITS.get)
        flops[dtype] += round(2 * times * math.prod(arrays(x.shape)[0].dims) * depth)
    return dict(flops)

  def kernels(self) -> dict[str, int]:
    """Number of launches of each kernel."""
    calls = collections.Counter()
    for x, _, times in self.executed:
      if x.kernel:
        calls[x.kernel] += times
    return dict(calls)

  def collectives(self) -> dict[str, tuple[int, int]]:
    """Kind -> (number started by each device, bytes of the larger of operands and results)."""
    found = {}
    for kind, times, size, _ in sorted(self._collectives):
      count, total = found.get(kind, (0, 0))
      found[kind] = (count + times, total + times * size)
    return found

  def interconnect_bytes(self) -> float:
    """Minimum bytes that a device sends: all but its own shard, twice for an all-reduce."""
    factor = lambda kind, n: {"all-reduce": 2, "collective-permute": n / (n - 1)}.get(kind, 1)
    return sum(
      times * size * (n - 1) / n * factor(kind, n)
      for kind, times, size, n in self._collectives
      if n > 1
    )

  @functools.cached_property
  def _collectives(self) -> list[tuple[str, int, int, int]]:
    """(kind, executions, bytes of the larger of operands and results, group size)."""
    found = {}
    for x, where, times in self.executed:
      kind = x.op.removesuffix("-start")
      if kind not in _COLLECTIVES:
        continue
      # TPU writes a reduce-scatter as a fusion of this name with an all-reduce and a slice inside.
      kind = "reduce-scatter" if where.startswith("all-reduce-scatter") else kind
      size = max(self._collective_bytes(x, where))
      # TPU spreads one asynchronous collective over several fusions, some of them in inner loops.
      key = x.attribute("channel_id") if "chain_id=" in x.rest else len(found)
      before = found[key][1] if key in found else times
      found[key] = (kind, min(times, before), size, _group_size(x.rest))
    return list(found.values())

  def _collective_bytes(self, collective, where):
    """(bytes of operands, bytes of results)."""
    operands = sum(_bytes(self.computations[where][y].shape) for y in collective.operands)
    # The result of an asynchronous start includes its operands, except for an all-reduce.
    both = collective.op.endswith("-start") and collective.op != "all-reduce-start"
    return operands, _bytes(collective.shape) - (operands if both else 0)

  def moves(self) -> list[Move]:
    """HBM traffic of every top-level instruction in program order.

    A slice read and an in-place update count the slice only. A kernel operand counts once, even
    if the kernel reads it several times.
    """
    found = []
    fused = {x.attribute("calls") for x, _, _ in self.executed if x.op == "fusion"}
    for x, where, times in self.executed:
      if where in fused or x.op in _FREE or x.op.endswith("-done") or x.target in _ANNOTATIONS:
        continue
      everywhere = self._moved(x, where) if x.kernel else []
      in_hbm = self._moved(x, where, without=_VMEM)
      source = re.search(r'op_name="([^"]*)"', x.rest)
      sizes = times * sum(in_hbm), times * sum(everywhere)
      found.append(Move(x.name, source[1] if source else "", sizes[0], x.kernel, sizes[1]))
    return found

  def _moved(self, x, where, without=None) -> list[int]:
    """Bytes of each array that x reads or writes, excluding one memory space."""
    computation = self.computations[where]
    results = arrays(x.shape)
    if x.op.removesuffix("-start") in _COLLECTIVES:
      return list(self._collective_bytes(x, where))
    if x.op.endswith("-start"):
      # Source and destination in either order; the smaller one is moved (a slice or a full copy).
      ends = [y for y in results if y.dims]
      return [min(y.padded_bytes for y in ends)] * sum(y.space != without for y in ends)
    inside = self.computations[x.attribute("calls")] if x.op == "fusion" else computation
    end = _root(inside) if x.op == "fusion" else x
    made = end.operands if end.op == "tuple" else [end.name] * len(results)
    sizes = [
      full.padded_bytes if part is None else part
      for full, name in zip(results, made, strict=True)
      if full.space != without
      for part in [self._bytes_written(inside, name)]
    ]
    # A buffer passed twice counts once.
    for name in dict.fromkeys(x.operands):
      parts = [self._bytes_read(x, i) for i, y in enumerate(x.operands) if y == name]
      full = sum(y.padded_bytes for y in arrays(computation[name].shape) if y.space != without)
      sizes.append(full if None in parts else min(full, sum(parts)))
    return sizes

  def _bytes_read(self, x, i) -> int | None:
    """Bytes that x reads of operand i; None for all of it."""
    if x.op == "fusion":
      inside = self.computations[x.attribute("calls")]
      parameters = {int(y.rest): name for name, y in inside.items() if y.op == "parameter"}
      return self._bytes_used(inside, parameters[i])
    if i == 0 and x.op in _SLICE_READS:
      return _padded_bytes(x.shape)
    return 0 if i == 0 and x.op in _IN_PLACE_UPDATES else None

  def _bytes_used(self, computation, name):
    """Sum of `_bytes_read` over all users of an instruction; None also if it is the root."""
    total = None if computation[name].root else 0
    for user in computation.values():
      for i, operand in enumerate(user.operands):
        if operand == name:
          alias = user.op == "bitcast" or self._returns_operand(user, i)
          part = self._bytes_used(computation, user.name) if alias else self._bytes_read(user, i)
          if part is None or total is None:
            return None
          total += part
    return total

  def _returns_operand(self, x, i) -> bool:
    """Whether x is a fusion that returns operand i unchanged."""
    if x.op != "fusion":
      return False
    inside = self.computations[x.attribute("calls")]
    end = _root(inside)
    while end.op == "bitcast":
      end = inside[end.operands[0]]
    return end.op == "parameter" and int(end.rest) == i

  def _bytes_written(self, computation, name) -> int | None:
    """Bytes that an instruction writes of its result; None for all of it."""
    x = computation[name]
    while x.op == "bitcast":
      x = computation[x.operands[0]]
    if x.op in _IN_PLACE_UPDATES:
      return _padded_bytes(computation[x.operands[_IN_PLACE_UPDATES[x.op]]].shape)
    if x.op == "fusion":
      inside = self.computations[x.attribute("calls")]
      end = _root(inside)
      return None if end.op == "tuple" else self._bytes_written(inside, end.name)
    return None


def _bytes(shape):
  return sum(x.bytes for x in arrays(shape) if x.space != _SEMAPHORES)


def _padded_bytes(shape):
  return sum(x.padded_bytes for x in arrays(shape))


def _root(computation: Computation) -> Instruction:
  return next(x for x in computation.values() if x.root)


def _source(computation, name):
  """Follow copies and bitcasts back to the original instruction."""
  while computation[name].op in ("copy", "bitcast"):
    name = computation[name].operands[0]
  return computation[name]


def _constant(computation, name) -> int | None:
  value = _source(computation, name)
  return int(value.rest) if value.op == "constant" and value.rest.isdigit() else None


def _group_size(attributes: str) -> int:
  """Number of devices in a replica group, in each of XLA's three notations."""
  if mesh := re.search(r"replica_groups=\w*\[([^\]]*=[^\]]*)\] ?\{([^}]*)\}", attributes):
    sizes = {axis: int(n) for axis, n in re.findall(r"'?(\w+)'?=(\d+)", mesh[1])}
    return math.prod(sizes[axis] for axis in re.findall(r"\w+", mesh[2]))
  if shape := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
    return int(shape[1])
  if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
    return listed[1].count(",") + 1
  return 2  # source-target pairs of a collective-permute


def _dot_depth(dot, operands):
  axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)[1]
  return math.prod(operands[0].dims[int(i)] for i in axes.split(",") if i)


def _convolution_depth(convolution, operands):
  """Multiplications per output element, averaged over output positions; padding is excluded."""
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
    positions = range(0, padded - (size - 1) * dilate, stride)
    inside = sum(
      0 <= p + k * dilate - low < (n - 1) * spread + 1 and (p + k * dilate - low) % spread == 0
      for p in positions
      for k in range(size)
    )
    depth *= inside / len(positions)
  return depth


def _braces(text, name):
  found = re.search(rf"\b{name}=\{{([^}}]*)\}}", text)
  return found[1] if found else ""
