"""The paper's speed figure on this machine: recurrent against chunkwise, forward and backward.

Each shape is checked first (chunkwise equals recurrent), then all forms are timed in turn, so that
a ratio compares runs of the same minute. Writes JSON lines and a PNG beside the paper's curve.

  python -m experiments.kernel_speed
  python -m experiments.kernel_speed --heads=4 --length=2048 --head_size=128 --autodiff
"""

import dataclasses
import itertools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

from deltanet_jax.ops import delta_rule
from deltanet_jax.ops.delta_rule import chunkwise
from deltanet_jax.ops.delta_rule.specs import Spec, random_inputs
from experiments import provenance
from experiments.plots import kernel_speed as plot

_LENGTHS = flags.DEFINE_multi_integer(
  "length", [512, 1024, 2048, 4096, 8192], "Sequence length; repeat the flag for several."
)
_HEAD_SIZES = flags.DEFINE_multi_integer("head_size", [64, 128, 256], "Head size dk = dv.")
_CHUNKS = flags.DEFINE_multi_integer(
  "chunk", [0], "Chunk size of the chunkwise form; 0 is its default. Repeat for several."
)
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 2, "Heads.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Dtype of the inputs.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed rounds; the best one counts.", lower_bound=1)
_BUDGET = flags.DEFINE_float(
  "budget", 5.0, "Seconds of timing per shape after which no further round is begun; 0: no limit."
)
_AUTODIFF = flags.DEFINE_bool(
  "autodiff", False, "Also time plain autodiff of the chunkwise forward, without its own backward."
)
_OUT = flags.DEFINE_string("out", "results/kernel_speed", "Folder for JSON lines and figure.")

# Relative RMS by which a form may differ from the recurrence before anything is timed.
_AGREE = {"float32": 1e-5, "bfloat16": 1.5e-2}


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One compiled function of one form."""

  form: str
  direction: str
  chunk: int | None
  run: jax.stages.Compiled


def compile_forms(inputs: dict, cotangents: tuple) -> list[Candidate]:
  """Forward and forward+backward of every form asked for, the recurrence first."""
  forms = [("recurrent", None, lambda **x: delta_rule(**x, implementation="recurrent"))]
  for chunk in _CHUNKS.value:
    own = lambda c=chunk or None, **x: delta_rule(**x, implementation="chunkwise", chunk=c)
    forms.append(("chunkwise", chunk, own))
    if _AUTODIFF.value:
      plain = lambda c=chunk or None, **x: chunkwise.chunkwise(
        **x, g=None, run=None, scale=1.0, chunk=c, autodiff=True
      )
      forms.append(("chunkwise, autodiff", chunk, plain))

  candidates = []
  for form, chunk, f in forms:
    forward = jax.jit(lambda x, _, f=f: f(**x))
    # The outputs are returned too: a backward alone would let XLA drop half of the forward.
    both = jax.jit(
      lambda x, ct, f=f: (lambda y, pull: (y, pull(ct)))(*jax.vjp(lambda x: f(**x), x))
    )
    for direction, call in (("forward", forward), ("forward+backward", both)):
      compiled = call.lower(inputs, cotangents).compile()
      candidates.append(Candidate(form, direction, chunk or None, compiled))
  return candidates


def check_agreement(outputs: dict[Candidate, object]):
  """Stops with the name of the form that differs from the recurrence."""
  truth = {c.direction: out for c, out in outputs.items() if c.form == "recurrent"}
  for candidate, out in outputs.items():
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(truth[candidate.direction])):
      x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
      error = np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))
      if not error <= _AGREE[_DTYPE.value]:
        raise AssertionError(
          f"{candidate.form} {candidate.direction} differs from the recurrence by {error:.1e}."
        )


def time_shape(spec: Spec) -> list[dict]:
  """Best seconds of every form at one shape, in rounds over all of them."""
  inputs = random_inputs(spec, dtype="float32")
  cast = lambda name, x: jnp.asarray(x, "float32" if name == "S0" else _DTYPE.value)
  inputs = {name: cast(name, x) for name, x in inputs.items()}
  cotangents = (inputs["v"], inputs["S0"])
  candidates = compile_forms(inputs, cotangents)
  best = dict.fromkeys(candidates, float("inf"))
  rounds, begun = 0, time.perf_counter()
  while rounds < _REPEATS.value:
    if rounds and _BUDGET.value and time.perf_counter() - begun > _BUDGET.value:
      break
    outputs = {}
    for candidate in candidates:
      # What ran before leaves caches and allocator in its own state, which a short run feels.
      for _ in range(3 if best[candidate] < 1 else 1):
        out = None  # a result that is kept would make the next run take fresh memory
        start = time.perf_counter()
        out = jax.block_until_ready(candidate.run(inputs, cotangents))
        best[candidate] = min(best[candidate], time.perf_counter() - start)
      if not rounds:
        outputs[candidate] = jax.tree.map(np.asarray, out)
      del out
    if not rounds:
      check_agreement(outputs)
    rounds += 1
  slow = {c.direction: t for c, t in best.items() if c.form == "recurrent"}
  return [
    dict(
      form=c.form,
      chunk=c.chunk,
      direction=c.direction,
      batch=spec.B,
      heads=spec.H,
      length=spec.L,
      head_size=spec.dk,
      dtype=_DTYPE.value,
      seconds=seconds,
      speedup=slow[c.direction] / seconds,
      temporary_bytes=c.run.memory_analysis().temp_size_in_bytes,
      rounds=rounds,
    )
    for c, seconds in best.items()
  ]


def print_table(rows: list[dict]):
  """One line per shape and form: milliseconds, and the speed-up over the recurrence."""
  print("\nmilliseconds, and speed-up over recurrent (the paper's GPU figure in the last column)")
  header = ("head", "length", "form", "chunk", "forward", "fwd+bwd", "paper")
  line = "{:>5} {:>7}  {:<20} {:>5} {:>18} {:>18} {:>6}".format
  print(line(*header))
  key = lambda r: (r["head_size"], r["length"], r["form"], r["chunk"])
  for (size, length, form, chunk), pair in itertools.groupby(rows, key):
    cells = [f"{1e3 * r['seconds']:9.1f} ({r['speedup']:5.1f}×)" for r in pair]
    paper = plot.PAPER.get(size) and plot.paper_speedup(size).get(length)
    shown = f"{paper:.1f}×" if paper and form == "chunkwise" else ""
    print(line(size, length, form, chunk or "", *cells, shown))


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}; see --help")
  shapes = list(itertools.product(_HEAD_SIZES.value, _LENGTHS.value))
  began = provenance.describe()
  rows = []
  for size, length in (bar := tqdm(shapes, unit="shape")):
    bar.set_description(f"head size {size}, length {length}")
    rows += time_shape(Spec(B=_BATCH.value, L=length, H=_HEADS.value, dk=size))
  rows = [row | began for row in rows]
  print_table(rows)
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  (out / "speed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  plot.draw(rows, out / "speed.png")
  print(f"\nwrote {out / 'speed.jsonl'} and {out / 'speed.png'}")


if __name__ == "__main__":
  app.run(main)
