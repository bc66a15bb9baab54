"""What the real compilers make of every kernel, for chips that are not here: counts, not timings.

Bundles per token and head, bytes of VMEM (TPU); registers, bytes of shared memory (GPU); bytes that
registers spill (on TPU into VMEM); HBM bytes of a kernel and of the whole program around it, over
the least that its pass must move; CPU seconds to compile.
Needs `pip install -e .[aot]`. Head size 128 alone, on five targets, took ten minutes on two cores.

  python -m experiments.kernel_report --target=v5e --target=h100 --errors
  python -m experiments.kernel_report --target=v6e --head_size=128 --dtype=bfloat16 --chunk=64
"""

import itertools
import json
import pathlib

import jax
from absl import app, flags
from tqdm import tqdm

from experiments import ahead_of_time as aot
from experiments import kernel_errors, kernel_programs, kernel_tables, provenance

_TARGETS = flags.DEFINE_multi_enum(
  "target", list(aot.TARGETS), list(aot.TARGETS), "Chip; repeat the flag for several."
)
_PROGRAMS = flags.DEFINE_multi_enum(
  "program", None, sorted({name for x in kernel_programs.PROGRAMS.values() for name in x}),
  "Programs, as the tables name them; all if unset.",
)  # fmt: skip
_DTYPES = flags.DEFINE_multi_enum(
  "dtype", ["bfloat16", "float32"], ["bfloat16", "float32"], "Dtype of q, k, v."
)
_HEAD_SIZES = flags.DEFINE_multi_integer("head_size", [64, 128, 256], "Head size of keys.")
_VALUE_SIZE = flags.DEFINE_integer("value_size", None, "Head size of values; the keys' if unset.")
_CHUNKS = flags.DEFINE_multi_integer("chunk", None, "Tokens per chunk; the kernels' own if unset.")
_INPUTS = flags.DEFINE_multi_enum(
  "inputs", ["plain", "full"], ["plain", "full"],
  "plain: q, k, v, beta; full: with g, S0 and segments.",
)  # fmt: skip
_ERRORS = flags.DEFINE_bool(
  "errors", False, "Also the error of every precision of the inverse, interpreted here; 2 minutes."
)
_OUT = flags.DEFINE_string("out", "results/kernel_report", "Folder for JSON lines and tables.")

_COLUMNS = {
  "program": ("program", str),
  "kernel": ("kernel", str),
  "dtype": ("dtype", str),
  "dk": ("head_size", str),
  "dv": ("value_size", str),
  "chunk": ("chunk", str),
  "inputs": ("inputs", str),
  "bundles": ("bundles_per_token_head", "{:.2f}".format),
  "registers": ("registers", str),
  "spilled": ("spill_bytes", str),
  "shared": ("shared_bytes", str),
  "VMEM": ("vmem_bytes", str),
  "bytes/min": ("bytes_over_minimum", "{:.2f}".format),
  "program/min": ("program_bytes_over_minimum", "{:.2f}".format),
  "cpu s": ("compile_cpu_seconds", "{:.1f}".format),
}


def cases(target: str) -> list[kernel_programs.Case]:
  """Every program at every shape asked for."""
  platform = aot.TARGETS[target].platform
  axes = itertools.product(
    [x for x in kernel_programs.PROGRAMS[platform] if x in (_PROGRAMS.value or [x])],
    _DTYPES.value,
    ((d, _VALUE_SIZE.value or d) for d in _HEAD_SIZES.value),
    _CHUNKS.value or [kernel_programs.CHUNKS[platform]],
    _INPUTS.value,
  )
  # A decoding step has no chunks.
  cases = [kernel_programs.Case(a, b, *sizes, *rest) for a, b, sizes, *rest in axes]
  return list(dict.fromkeys(case.normal(target) for case in cases))


def measure(targets: list[str]):
  """Yields the rows of every program as soon as it is compiled."""
  with tqdm(total=sum(len(cases(x)) for x in targets), unit="program") as bar:
    for target in targets:
      with aot.Worker(target) as worker:
        for case in cases(target):
          size = f"{case.dtype} {case.head_size} x {case.value_size} {case.inputs}"
          bar.set_description(f"{target} {case.program} {size}")
          try:
            yield worker.call(kernel_programs.measure, target, case)
          except RuntimeError as error:
            yield kernel_programs.failures(target, case, error)
          bar.update()


def markdown(target: str, rows: list[dict]) -> str:
  """A table of one target; a kernel that does not compile shows the error instead."""
  rows = [row for row in rows if row["target"] == target]
  columns = {x: y for x, y in _COLUMNS.items() if any(y[0] in row for row in rows)}
  lines = [list(columns), ["---"] * len(columns)]
  for row in rows:
    cells = [show(row[key]) if row.get(key) is not None else "" for key, show in columns.values()]
    lines.append(cells if row["compiles"] else [*cells[:7], row["error"]])
  return f"### {target}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def measure_errors():
  for case in tqdm(kernel_errors.cases(), unit="case", desc="errors"):
    yield kernel_errors.measure(case)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]!r}; see --help")
  problems = [x for x in map(aot.missing, dict.fromkeys(_TARGETS.value)) if x]
  if problems:
    raise SystemExit("\n".join(problems))
  jax.config.update("jax_platforms", "cpu")
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  began, targets, rows = provenance.describe(), list(dict.fromkeys(_TARGETS.value)), []
  # Line by line: a long report that is stopped keeps what it has.
  with open(out / "kernels.jsonl", "w", buffering=1) as lines:
    for found in measure(targets):
      rows += [row | began for row in found]
      lines.writelines(json.dumps(row) + "\n" for row in rows[-len(found) :])
    errors = [row | began for row in (measure_errors() if _ERRORS.value else ())]
    lines.writelines(json.dumps(row) + "\n" for row in errors)
  tables = [markdown(x, rows) for x in targets] + [kernel_tables.error_table(errors)] * bool(errors)
  (out / "kernels.md").write_text("\n".join(tables))
  print((out / "kernels.md").read_text())
  failed = sum(not row["compiles"] for row in rows)
  print(f"{len(rows)} kernels, {failed} did not compile; wrote {out}/kernels.jsonl and kernels.md")


if __name__ == "__main__":
  app.run(main)
