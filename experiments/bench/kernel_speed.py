"""The delta rule's forms against each other on this machine, forward and backward.

Each shape is checked first against the recurrence, then all forms are timed in turn, so that a
ratio compares runs of the same minute. Three curves:

  length        the paper's speed figure: chunkwise over recurrent, forward and forward+backward
  forward       the forward alone: what `implementation=None` takes, beside both forms
  batch_heads   cost per token and head, forward+backward, while batch times heads grows

  python -m experiments.bench.kernel_speed
  python -m experiments.bench.kernel_speed --curve=length --shape=d64_L2048 --shape=d128_L2048
  python -m experiments.bench.kernel_speed --curve=batch_heads --rounds=10
  python -m experiments.bench.kernel_speed --curve=length --memory=system
"""

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

_CURVES = flags.DEFINE_multi_enum("curve", list(CURVES), list(CURVES), "Curve; repeat for several.")
_SHAPES = flags.DEFINE_multi_enum(
  "shape", None, sorted(CURVES["length"] | CURVES["forward"]),
  "Only shapes of this name, of `length` and `forward`; repeat the flag for several.",
)  # fmt: skip
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Dtype of the inputs.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds; the best one counts.", lower_bound=1)
_BUDGET = flags.DEFINE_float(
  "budget", 5.0, "Seconds of timing per shape after which no further round is begun; 0: no limit."
)
_MEMORY = flags.DEFINE_enum(
  "memory", "kept", ["kept", "system"],
  "Whether the process keeps what it frees, as in training here, or gives it back to the system, "
  "as Python does by itself: then a scan that stores all states pays for fresh pages.",
)  # fmt: skip

# Relative RMS by which a form may differ from the recurrence before anything is timed.
_AGREE = {"float32": 1e-5, "bfloat16": 1.5e-2}
# Forms and directions of a curve; "default" is implementation=None.
_FORMS = {
  "length": [
    (form, direction)
    for form in ("recurrent", "chunkwise")
    for direction in ("forward", "forward+backward")
  ],
  "forward": [(form, "forward") for form in ("recurrent", "chunkwise", "default")],
  "batch_heads": [("default", "forward+backward")],
}


class TooLargeError(Exception):
  """A shape that does not fit this machine."""


def rule_of(form: str):
  return functools.partial(delta_rule, implementation=None if form == "default" else form)


@dataclasses.dataclass(frozen=True)
class Problem:
  """One form of one shape, compiled, with its inputs."""

  key: dict
  inputs: dict
  cotangents: tuple
  program: jax.stages.Compiled

  def run(self) -> dict:
    return self.program(self.inputs, self.cotangents)


def key_of(curve: str, spec: Spec, form: str, direction: str) -> dict:
  shape = dict(head_size=spec.dk, batch=spec.B, heads=spec.H, length=spec.L, dtype=_DTYPE.value)
  return dict(curve=curve, **shape, memory=_MEMORY.value, direction=direction, form=form)


def _program(rule, direction):
  """(inputs, cotangents) -> outputs, and with the backward gradients, by name."""
  if direction == "forward+backward":
    return testing.with_gradients(rule)
  return jax.jit(lambda inputs, _: dict(zip(("o", "S"), rule(**inputs))))


@functools.cache
def _truth(direction):
  """One program for all shapes: of a single row and head it is compiled once for each length."""
  return _program(rule_of("recurrent"), direction)


def prepare(curve: str, spec: Spec) -> list[Problem]:
  """Compiles all forms of a shape and checks each against the recurrence.

  TooLargeError if one needs more memory than this machine has, ValueError if one is wrong.
  """
  inputs = testing.cast(random_inputs(spec, dtype="float32"), _DTYPE.value)
  cotangents = testing.random_cotangents(rule_of("default"), inputs)
  cotangents = tuple(jnp.asarray(x, "float32") for x in cotangents)
  problems = []
  for form, direction in _FORMS[curve]:
    program = _program(rule_of(form), direction).lower(inputs, cotangents).compile()
    problem = Problem(key_of(curve, spec, form, direction), inputs, cotangents, program)
    needed = program.memory_analysis().temp_size_in_bytes
    if needed > 0.8 * _memory():
      raise TooLargeError(f"{form} {direction} needs {needed / 1e9:.1f} GB")
    check(problem)
    problems.append(problem)
  return problems


def check(problem: Problem):
  """ValueError with the name of what differs from the recurrence.

  Rows and heads are independent: the first and the last of them are computed again alone.
  """
  got = jax.tree.map(np.asarray, problem.run())
  direction, dtype = problem.key["direction"], problem.key["dtype"]
  truth = _truth(direction)
  for row, head in ((0, 0), (-1, -1)):
    rows = slice(row, row + 1 or None)
    heads = slice(head, head + 1 or None)
    # S0 and its gradient are [B H dk dv], everything else [B L H ...].
    cut = lambda name, x: x[rows, heads] if name.endswith(("S", "S0")) else x[rows, :, heads]
    inputs = {name: cut(name, x) for name, x in problem.inputs.items()}
    cotangents = tuple(cut(name, x) for name, x in zip(("o", "S"), problem.cotangents))
    for name, want in truth(inputs, cotangents).items():
      error = testing.rel_rms(cut(name, got[name]), want)
      if not error <= _AGREE[dtype]:
        what = " ".join(f"{x} {y}" for x, y in problem.key.items())
        raise ValueError(f"{name} differs from the recurrence by {error:.1e}: {what}")


def measure(problems: list[Problem], budget: float) -> dict[int, dict]:
  """Times of all problems, in rounds over all of them."""
  runs = {i: problem.run for i, problem in enumerate(problems)}
  best, rounds = best_seconds(runs, _ROUNDS.value, budget)
  metrics = {}
  for i, problem in enumerate(problems):
    key, memory = problem.key, problem.program.memory_analysis()
    per_token = best[i] / (key["batch"] * key["heads"] * key["length"])
    metrics[i] = dict(
      seconds=best[i],
      microseconds_per_token_and_head=1e6 * per_token,
      temporary_bytes=memory.temp_size_in_bytes,
      rounds=rounds,
    )
  return metrics


def forms(curve: str, spec: Spec) -> list[tuple[dict, dict]]:
  """Keys and metrics of all forms of one shape, with the speed-up over the recurrence."""
  problems = prepare(curve, spec)
  metrics = measure(problems, _BUDGET.value)
  recurrent = {
    problem.key["direction"]: metrics[i]["seconds"]
    for i, problem in enumerate(problems)
    if problem.key["form"] == "recurrent"
  }
  others = [metrics[i]["seconds"] for i, x in enumerate(problems) if x.key["form"] != "default"]
  rows = []
  for i, problem in enumerate(problems):
    ratios = dict(speedup=recurrent[problem.key["direction"]] / metrics[i]["seconds"])
    if curve == "forward":
      ratios["over_fastest"] = metrics[i]["seconds"] / min(others)
    rows.append((problem.key, metrics[i] | ratios))
  return rows


def together(curve: str, specs: list[Spec]) -> list[tuple[dict, dict]]:
  """Keys and metrics of all shapes, interleaved, with the cost over the cheapest of a head size."""
  problems = [problem for spec in tqdm(specs, unit="shape") for problem in prepare(curve, spec)]
  metrics = measure(problems, _BUDGET.value * len(problems))
  cost = lambda i: metrics[i]["microseconds_per_token_and_head"]
  size = lambda i: problems[i].key["head_size"]
  cheapest = {d: min(cost(i) for i in metrics if size(i) == d) for d in {size(i) for i in metrics}}
  return [
    (problem.key, metrics[i] | dict(over_cheapest=cost(i) / cheapest[size(i)]))
    for i, problem in enumerate(problems)
  ]


def _memory():
  """Bytes that this machine has left."""
  return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def show(rows: list[tuple[dict, dict]]) -> str:
  header = ["direction", "form", "head size", "batch", "heads", "length", "ms", "ratio"]
  lines = []
  for key, x in rows:
    cells = [key["direction"], key["form"]]
    cells += [str(key[name]) for name in ("head_size", "batch", "heads", "length")]
    if "over_cheapest" in x:
      ratio = f"{x['over_cheapest']:.2f} x the cheapest token"
    else:
      ratio = f"{x['speedup']:.2f} x as fast as recurrent"
    lines.append([*cells, f"{1e3 * x['seconds']:.2f}", ratio])
  return table(header, lines)


def main():
  if _MEMORY.value == "kept":
    keep_freed_memory()
  out = records.open("kernel_speed")
  rows = []
  for curve in dict.fromkeys(_CURVES.value):
    shapes = CURVES[curve]
    done = lambda spec: all(out.has(key_of(curve, spec, *form)) for form in _FORMS[curve])
    if curve == "batch_heads":
      # A ratio to the cheapest needs all of them in one run.
      found = [] if all(map(done, shapes.values())) else together(curve, list(shapes.values()))
      for key, metrics in found:
        out.write(key, metrics)
      rows += found
      continue
    wanted = [name for name in shapes if name in (_SHAPES.value or [name])]
    for name in (bar := tqdm([x for x in wanted if not done(shapes[x])], unit="shape")):
      bar.set_description(f"{curve} {name}")
      start = time.perf_counter()
      try:
        found = forms(curve, shapes[name])
      except TooLargeError as e:
        tqdm.write(f"{name} is left out: {e}, more than this machine has to spare")
        continue
      for key, metrics in found:
        out.write(key, metrics, time.perf_counter() - start)
      rows += found
  if rows:
    print(show(rows))
  print(f"all rows: {out.path}; metrics: python -m experiments.plots")


if __name__ == "__main__":
  app.run(main, keep_memory=False)
