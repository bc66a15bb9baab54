"""Time the implementations of the delta rule on this machine, forward and backward.

Every implementation is first checked against the recurrent form, then all are timed alternately, so
that speedups compare runs of the same minute. Three curves:

  length        the paper's speed figure: chunkwise over recurrent, forward and forward+backward
  forward       forward pass only: the default (`implementation=None`), recurrent and chunkwise
  batch_heads   cost per token and head, forward+backward, as batch size times heads grows

  python -m experiments.bench.kernel_speed
  python -m experiments.bench.kernel_speed --curve=length --shape=d64_L2048 --shape=d128_L2048
  python -m experiments.bench.kernel_speed --curve=batch_heads --rounds=10
  python -m experiments.bench.kernel_speed --curve=length --memory=system
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import dataclasses
import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from deltanet_jax.host_memory import keep_freed_memory
from deltanet_jax.ops import delta_rule, testing
from deltanet_jax.ops.testing import Spec, random_inputs
from experiments.bench.shapes import CURVES
from experiments.bench.timing import best_seconds
from experiments.lib import app, records
from experiments.lib.tables import table

_CURVES = flags.DEFINE_multi_enum("curve", list(CURVES), list(CURVES), "Curve; repeatable.")
_SHAPES = flags.DEFINE_multi_enum(
  "shape", None, sorted(CURVES["length"] | CURVES["forward"]),
  "Name of a shape of the curves `length` and `forward`; repeatable. All by default.",
)  # fmt: skip
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Dtype of the inputs.")
_ROUNDS = flags.DEFINE_integer(
  "rounds", 5, "Timed rounds, of which the fastest counts.", lower_bound=1
)
_BUDGET = flags.DEFINE_float(
  "budget", 5.0, "Seconds per shape after which no further round is started; 0: no limit."
)
_MEMORY = flags.DEFINE_enum(
  "memory", "kept", ["kept", "system"],
  "Allocator setting: keep freed memory, as training does, or return it to the system, the default "
  "of the allocator: then a scan that stores all states pays for page faults.",
)  # fmt: skip

# Tolerance of the check against the recurrent form: relative RMS error.
_TOLERANCE = {"float32": 1e-5, "bfloat16": 1.5e-2}
# Implementations and directions of a curve; "default" is implementation=None.
_VARIANTS = {
  "length": [
    (implementation, direction)
    for implementation in ("recurrent", "chunkwise")
    for direction in ("forward", "forward+backward")
  ],
  "forward": [(x, "forward") for x in ("recurrent", "chunkwise", "default")],
  "batch_heads": [("default", "forward+backward")],
}


class TooLargeError(Exception):
  """A shape needs more memory than this machine has."""


def rule_of(implementation: str):
  """The delta rule by an implementation."""
  chosen = None if implementation == "default" else implementation
  return functools.partial(delta_rule, implementation=chosen)


@dataclasses.dataclass(frozen=True)
class CompiledCase:
  """One implementation at one shape, compiled, with its inputs."""

  key: dict
  inputs: dict
  cotangents: tuple
  program: jax.stages.Compiled

  def run(self) -> dict:
    return self.program(self.inputs, self.cotangents)


def key_of(curve: str, spec: Spec, implementation: str, direction: str) -> dict:
  """Key of a record."""
  shape = dict(head_size=spec.dk, batch=spec.B, heads=spec.H, length=spec.L, dtype=_DTYPE.value)
  variant = dict(direction=direction, implementation=implementation)
  return dict(curve=curve, **shape, memory=_MEMORY.value, **variant)


def _program(rule, direction):
  """Compile (inputs, cotangents) -> outputs by name; with the backward pass also gradients."""
  if direction == "forward+backward":
    return testing.with_gradients(rule)
  return jax.jit(lambda inputs, _: dict(zip(("o", "S"), rule(**inputs))))


@functools.cache
def _reference(direction):
  """The recurrent form of one sequence and head: compiled once per length."""
  return _program(rule_of("recurrent"), direction)


def prepare(curve: str, spec: Spec) -> list[CompiledCase]:
  """Compile all implementations of a shape and check each against the recurrent form.

  Raises:
    TooLargeError: one needs more memory than this machine has.
    ValueError: one has wrong results.
  """
  inputs = testing.cast(random_inputs(spec, dtype="float32"), _DTYPE.value)
  cotangents = testing.random_cotangents(rule_of("default"), inputs)
  cotangents = tuple(jnp.asarray(x, "float32") for x in cotangents)
  cases = []
  for implementation, direction in _VARIANTS[curve]:
    program = _program(rule_of(implementation), direction).lower(inputs, cotangents).compile()
    case = CompiledCase(key_of(curve, spec, implementation, direction), inputs, cotangents, program)
    needed = program.memory_analysis().temp_size_in_bytes
    if needed > 0.8 * _memory():
      raise TooLargeError(f"{implementation} {direction} needs {needed / 1e9:.1f} GB")
    check(case)
    cases.append(case)
  return cases


def check(case: CompiledCase):
  """ValueError with the name of an output or gradient that differs from the recurrent form.

  Sequences and heads are independent: only the first and the last of both are compared.
  """
  got = jax.tree.map(np.asarray, case.run())
  direction, dtype = case.key["direction"], case.key["dtype"]
  reference = _reference(direction)
  for i in (0, -1):
    one = slice(i, i + 1 or None)
    # S0 and its gradient are [B H dk dv], everything else [B L H ...].
    cut = lambda name, x: x[one, one] if name.endswith(("S", "S0")) else x[one, :, one]
    inputs = {name: cut(name, x) for name, x in case.inputs.items()}
    cotangents = tuple(cut(name, x) for name, x in zip(("o", "S"), case.cotangents))
    for name, want in reference(inputs, cotangents).items():
      error = testing.rel_rms(cut(name, got[name]), want)
      if not error <= _TOLERANCE[dtype]:
        what = " ".join(f"{x} {y}" for x, y in case.key.items())
        raise ValueError(f"{name} differs from the recurrent form by {error:.1e}: {what}")


def measure(cases: list[CompiledCase], budget: float) -> dict[int, dict]:
  """Time all cases alternately."""
  runs = {i: case.run for i, case in enumerate(cases)}
  best, rounds = best_seconds(runs, _ROUNDS.value, budget)
  metrics = {}
  for i, case in enumerate(cases):
    key, memory = case.key, case.program.memory_analysis()
    per_token = best[i] / (key["batch"] * key["heads"] * key["length"])
    metrics[i] = dict(
      seconds=best[i],
      microseconds_per_token_and_head=1e6 * per_token,
      temporary_bytes=memory.temp_size_in_bytes,
      rounds=rounds,
    )
  return metrics


def compare_implementations(curve: str, spec: Spec) -> list[tuple[dict, dict]]:
  """Keys and metrics of all implementations at one shape, with speedups over recurrent."""
  cases = prepare(curve, spec)
  metrics = measure(cases, _BUDGET.value)
  recurrent = {
    case.key["direction"]: metrics[i]["seconds"]
    for i, case in enumerate(cases)
    if case.key["implementation"] == "recurrent"
  }
  others = [
    metrics[i]["seconds"] for i, x in enumerate(cases) if x.key["implementation"] != "default"
  ]
  found = []
  for i, case in enumerate(cases):
    ratios = dict(speedup=recurrent[case.key["direction"]] / metrics[i]["seconds"])
    if curve == "forward":
      ratios["over_fastest"] = metrics[i]["seconds"] / min(others)
    found.append((case.key, metrics[i] | ratios))
  return found


def compare_shapes(curve: str, specs: list[Spec]) -> list[tuple[dict, dict]]:
  """Keys and metrics of all shapes, with the cost relative to the cheapest of the head size."""
  cases = [case for spec in tqdm(specs, unit="shape") for case in prepare(curve, spec)]
  metrics = measure(cases, _BUDGET.value * len(cases))
  cost = lambda i: metrics[i]["microseconds_per_token_and_head"]
  size = lambda i: cases[i].key["head_size"]
  cheapest = {d: min(cost(i) for i in metrics if size(i) == d) for d in {size(i) for i in metrics}}
  return [
    (case.key, metrics[i] | dict(over_cheapest=cost(i) / cheapest[size(i)]))
    for i, case in enumerate(cases)
  ]


def _memory():
  """Bytes of free memory."""
  return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def show(results: list[tuple[dict, dict]]) -> str:
  header = ["direction", "implementation", "head size", "batch", "heads", "length", "ms", "ratio"]
  lines = []
  for key, x in results:
    cells = [key["direction"], key["implementation"]]
    cells += [str(key[name]) for name in ("head_size", "batch", "heads", "length")]
    if "over_cheapest" in x:
      ratio = f"{x['over_cheapest']:.2f} × the cheapest token"
    else:
      ratio = f"{x['speedup']:.2f} × faster than recurrent"
    lines.append([*cells, f"{1e3 * x['seconds']:.2f}", ratio])
  return table(header, lines)


def main():
  if _MEMORY.value == "kept":
    keep_freed_memory()
  out = records.open("kernel_speed")
  results = []
  for curve in dict.fromkeys(_CURVES.value):
    shapes = CURVES[curve]
    done = lambda spec: all(out.has(key_of(curve, spec, *x)) for x in _VARIANTS[curve])
    if curve == "batch_heads":
      # The ratio to the cheapest shape needs all shapes in one run.
      found = (
        [] if all(map(done, shapes.values())) else compare_shapes(curve, list(shapes.values()))
      )
      for key, metrics in found:
        out.write(key, metrics)
      results += found
      continue
    wanted = [name for name in shapes if name in (_SHAPES.value or [name])]
    for name in (bar := tqdm([x for x in wanted if not done(shapes[x])], unit="shape")):
      bar.set_description(f"{curve} {name}")
      start = time.perf_counter()
      try:
        found = compare_implementations(curve, shapes[name])
      except TooLargeError as e:
        tqdm.write(f"skipping {name}: {e}, more than this machine has free")
        continue
      for key, metrics in found:
        out.write(key, metrics, time.perf_counter() - start)
      results += found
  if results:
    print(show(results))
  print(f"all records: {out.path}; table and figure: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main, keep_memory=False)
