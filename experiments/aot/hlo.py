"""What a compiled program does in one call, from its HLO text; loops count as often as they run.

The compilers' own cost_analysis omits kernels and counts a loop once, and there is none for a GPU
that is not here.
"""

import collections
import dataclasses
import functools
import math
import re

from experiments.aot.hlo_text import BITS, COUNTERS, VMEM, Text, arrays, root

_COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
  "collective-broadcast",
)
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
class Move:
  """An operation of a program, and what it moves to or from HBM, every time that it runs."""

  name: str
  source: str  # the JAX operation it comes from
  bytes: int
  kernel: str | None
  kernel_bytes: int  # of a kernel's operands and results, wherever they lie


def _bytes(shape):
  return sum(x.bytes for x in arrays(shape) if x.space != COUNTERS)


def _padded_bytes(shape):
  return sum(x.padded_bytes for x in arrays(shape))


class HloModule(Text):
  """What a program does; see `Text` for how it is read."""

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
      in_memory = self._moved(x, where, without=VMEM)
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
    end = root(inside) if x.op == "fusion" else x
    made = end.operands if end.op == "tuple" else [end.name] * len(results)
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
    """`_part_read` of all operations together that use this one; None too if it is the result."""
    total = None if computation[name].root else 0
    for user in computation.values():
      for i, operand in enumerate(user.operands):
        if operand == name:
          same = user.op == "bitcast" or self._gives_back(user, i)
          part = self._part_used(computation, user.name) if same else self._part_read(user, i)
          if part is None or total is None:
            return None
          total += part
    return total

  def _gives_back(self, x, i) -> bool:
    """Whether x is a fusion whose result is operand i as it is."""
    if x.op != "fusion":
      return False
    inside = self.computations[x.attribute("calls")]
    end = root(inside)
    while end.op == "bitcast":
      end = inside[end.operands[0]]
    return end.op == "parameter" and int(end.rest) == i

  def _part_written(self, computation, name) -> int | None:
    """Bytes that this operation writes of its result; None if that is all of it."""
    x = computation[name]
    while x.op == "bitcast":
      x = computation[x.operands[0]]
    if x.op in _PART_WRITTEN:
      return _padded_bytes(computation[x.operands[_PART_WRITTEN[x.op]]].shape)
    if x.op == "fusion":
      inside = self.computations[x.attribute("calls")]
      end = root(inside)
      return None if end.op == "tuple" else self._part_written(inside, end.name)
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
