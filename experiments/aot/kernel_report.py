"""Static resource usage of every kernel, compiled AOT for chips that are not attached.

Nothing is run, so there are no times. Reported per kernel:

  TPU   VLIW bundles per token and head, VMEM, spills (into VMEM)
  GPU   registers, spills, shared memory, barriers, asynchronous copies, matmul instruction shapes,
        occupancy (blocks per SM), waves
  both  HBM traffic of the kernel and of its program over the minimum (inputs read once, outputs
        written once), CPU seconds to compile

Needs `pip install -e .[aot]`. Head size 128 on five targets takes 10 minutes on 2 cores.

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
  "target", list(targets.TARGETS), list(targets.TARGETS), "Chip to compile for; repeatable."
)
_PROGRAMS = flags.DEFINE_multi_enum(
  "program", None, sorted({name for x in kernel_cases.PROGRAMS.values() for name in x}),
  "Programs to compile, named as in the tables; all if unset; repeatable.",
)  # fmt: skip
_DTYPES = flags.DEFINE_multi_enum(
  "dtype", ["bfloat16", "float32"], ["bfloat16", "float32"], "Dtype of q, k, v; repeatable."
)
_HEAD_SIZES = flags.DEFINE_multi_integer(
  "head_size", [64, 128, 256], "Head size dk of keys; repeatable."
)
_VALUE_SIZE = flags.DEFINE_integer("value_size", None, "Head size dv of values; dk if unset.")
_CHUNKS = flags.DEFINE_multi_integer(
  "chunk", None, "Chunk size; the kernel's default if unset; repeatable."
)
_INPUTS = flags.DEFINE_multi_enum(
  "inputs", ["plain", "full"], kernel_cases.INPUTS,
  "plain: q, k, v, beta; segments: with segment_ids; full: with a per-head gate, S0 and"
  " segment_ids; per_channel: with a per-channel gate; per_channel_full: full with a per-channel"
  " gate. Repeatable.",
)  # fmt: skip
_HEADS = flags.DEFINE_multi_integer("heads", [kernel_cases.HEADS], "Number of heads; repeatable.")


def cases(target: str) -> list[kernel_cases.KernelCase]:
  """All supported cases that the flags select."""
  platform = CHIPS[target].platform
  axes = itertools.product(
    [x for x in kernel_cases.PROGRAMS[platform] if x in (_PROGRAMS.value or [x])],
    _DTYPES.value,
    ((d, _VALUE_SIZE.value or d) for d in _HEAD_SIZES.value),
    _CHUNKS.value or [kernel_cases.CHUNKS[platform]],
    _INPUTS.value,
    _HEADS.value,
  )
  found = [kernel_cases.KernelCase(a, b, *sizes, *rest) for a, b, sizes, *rest in axes]
  supported = (case.with_supported_chunk(target) for case in found if case.supported(target))
  return list(dict.fromkeys(supported))


def measure(wanted: dict[str, list[kernel_cases.KernelCase]], out: records.Records) -> list[tuple]:
  """Compile all cases and write their records; each program's as soon as it is compiled.

  Args:
    wanted: cases by target.
  """
  results = []
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
          results += found
          bar.update()
  return results


def show(results: list[tuple[dict, dict]]) -> str:
  """One line per kernel; the compiler error for a kernel that does not compile."""
  header = ["kernel", "dtype", "head size", "chunk", "inputs", "resources", "HBM / minimum"]
  header.append("compile, CPU s")
  lines = []
  for key, x in results:
    sizes = f"{key['head_size']} x {key['value_size']}"
    cells = [f"{key['target']} {key['program']}: {key['kernel']}", key["dtype"], sizes]
    cells += [str(key["chunk"] or ""), key["inputs"]]
    if not x["compiles"]:
      lines.append([*cells, x["error"], "", ""])
      continue
    if "vmem_bytes" in x:
      usage = f"{bundles(x)} bundles, {x['vmem_bytes'] / 2**20:.1f} MiB VMEM"
    else:
      usage = f"{x['registers']} registers, {x['shared_bytes'] // 1024} KiB shared memory"
      usage += f", {x['blocks_per_sm']} blocks per SM, {x['barriers']} barriers"
    usage += f", {x['spill_bytes']} B spilled"
    cells += [usage, f"{x['hbm_over_minimum']:.2f}", f"{x['compile_cpu_seconds']:.1f}"]
    lines.append(cells)
  return table(header, lines)


def main():
  chosen = list(dict.fromkeys(_TARGETS.value))
  targets.check_installed([CHIPS[x].platform for x in chosen])
  jax.config.update("jax_platforms", "cpu")
  out = records.open("kernel_report")
  missing = lambda target, case: not all(map(out.has, kernel_cases.record_keys(target, case)))
  wanted = {x: [case for case in cases(x) if missing(x, case)] for x in chosen}
  results = measure(wanted, out)
  failed = sum(not metrics["compiles"] for _, metrics in results)
  if results:
    print(show(results))
  print(f"{len(results)} kernels, {failed} of them do not compile; all records: {out.path}")


if __name__ == "__main__":
  app.run(main)
