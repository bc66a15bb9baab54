"""What the real compilers make of every kernel, for chips that are not here: counts, not timings.

Bundles per token and head, bytes of VMEM (TPU); registers, bytes of shared memory, barriers,
asynchronous copies, shapes of products, blocks per core and waves of them (GPU); bytes that
registers spill (on TPU into VMEM); HBM traffic of a kernel and of the whole program around it, over
the least that its pass must move; CPU seconds to compile.
Needs `pip install -e .[aot]`. Head size 128 alone, on five targets, took ten minutes on two cores.

  python -m experiments.aot.kernel_report --target=v5e --target=h100
  python -m experiments.aot.kernel_report --target=v6e --head_size=128 --dtype=bfloat16 --chunk=64
"""

import itertools
import time

import jax
from absl import flags
from tqdm import tqdm

from deltanet_jax.chips import CHIPS
from experiments.aot import kernel_cases, kernel_programs, targets
from experiments.aot.worker import Worker
from experiments.lib import app, records
from experiments.lib.tables import table
from experiments.plots.kernel_report import bundles

_TARGETS = flags.DEFINE_multi_enum(
  "target", list(targets.TARGETS), list(targets.TARGETS), "Chip; repeat the flag for several."
)
_PROGRAMS = flags.DEFINE_multi_enum(
  "program", None, sorted({name for x in kernel_cases.PROGRAMS.values() for name in x}),
  "Programs, as the tables name them; all if unset.",
)  # fmt: skip
_DTYPES = flags.DEFINE_multi_enum(
  "dtype", ["bfloat16", "float32"], ["bfloat16", "float32"], "Dtype of q, k, v."
)
_HEAD_SIZES = flags.DEFINE_multi_integer("head_size", [64, 128, 256], "Head size of keys.")
_VALUE_SIZE = flags.DEFINE_integer("value_size", None, "Head size of values; the keys' if unset.")
_CHUNKS = flags.DEFINE_multi_integer("chunk", None, "Tokens per chunk; the kernels' own if unset.")
_INPUTS = flags.DEFINE_multi_enum(
  "inputs", ["plain", "full"], kernel_cases.INPUTS,
  "plain: q, k, v, beta; documents: with these; full: with g, S0 and documents; channels: the same"
  " with a g per key channel; gates of channels: with that g alone.",
)  # fmt: skip
_HEADS = flags.DEFINE_multi_integer("heads", [kernel_cases.HEADS], "Heads of keys and values.")


def cases(target: str) -> list[kernel_cases.KernelCase]:
  """Every program at every shape asked for."""
  platform = CHIPS[target].platform
  axes = itertools.product(
    [x for x in kernel_cases.PROGRAMS[platform] if x in (_PROGRAMS.value or [x])],
    _DTYPES.value,
    ((d, _VALUE_SIZE.value or d) for d in _HEAD_SIZES.value),
    _CHUNKS.value or [kernel_cases.CHUNKS[platform]],
    _INPUTS.value,
    _HEADS.value,
  )
  cases = [kernel_cases.KernelCase(a, b, *sizes, *rest) for a, b, sizes, *rest in axes]
  return list(dict.fromkeys(case.normal(target) for case in cases if case.served(target)))


def measure(wanted: dict[str, list[kernel_cases.KernelCase]], out: records.Records) -> list[tuple]:
  """Writes the rows of every program as soon as it is compiled; all keys and metrics."""
  rows = []
  with tqdm(total=sum(map(len, wanted.values())), unit="program") as bar:
    for target, cases in wanted.items():
      with Worker(targets.one(target), dump=True) as worker:
        for case in cases:
          size = f"{case.dtype} {case.head_size} x {case.value_size} {case.inputs}"
          bar.set_description(f"{target} {case.program} {size}")
          start = time.perf_counter()
          try:
            found = worker.call(kernel_programs.measure, target, case)
          except RuntimeError as error:
            found = kernel_programs.failures(target, case, error)
          for key, metrics in found:
            out.write(key, metrics, time.perf_counter() - start)
          rows += found
          bar.update()
  return rows


def show(rows: list[tuple[dict, dict]]) -> str:
  """A line per kernel; one that does not compile shows the error instead."""
  header = ["kernel", "dtype", "head size", "chunk", "inputs", "on chip", "HBM / minimum", "CPU s"]
  lines = []
  for key, x in rows:
    sizes = f"{key['head_size']} x {key['value_size']}"
    cells = [f"{key['target']} {key['program']}: {key['kernel']}", key["dtype"], sizes]
    cells += [str(key["chunk"] or ""), key["inputs"]]
    if not x["compiles"]:
      lines.append([*cells, x["error"], "", ""])
      continue
    if "bundles" in x:
      taken = f"{bundles(x)} bundles, {x['vmem_bytes'] / 2**20:.1f} MiB VMEM"
    else:
      taken = f"{x['registers']} registers, {x['shared_bytes'] // 1024} KiB shared"
      taken += f", {x['blocks_per_core']} blocks per core, {x['barriers']} barriers"
    taken += f", {x['spill_bytes']} B spilled"
    cells += [taken, f"{x['bytes_over_minimum']:.2f}", f"{x['compile_cpu_seconds']:.1f}"]
    lines.append(cells)
  return table(header, lines)


def main():
  chosen = list(dict.fromkeys(_TARGETS.value))
  targets.check_installed([CHIPS[x].platform for x in chosen])
  jax.config.update("jax_platforms", "cpu")
  out = records.open("kernel_report")
  missing = lambda target, case: not all(map(out.has, kernel_cases.keys(target, case)))
  wanted = {x: [case for case in cases(x) if missing(x, case)] for x in chosen}
  rows = measure(wanted, out)
  failed = sum(not metrics["compiles"] for _, metrics in rows)
  if rows:
    print(show(rows))
  print(f"{len(rows)} kernels, {failed} of them did not compile; all rows: {out.path}")


if __name__ == "__main__":
  app.run(main)
