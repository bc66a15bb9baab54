"""Check the kernels on the GPU or TPU of this machine: correctness, determinism and speed.

  python -m experiments.device_check               # on a machine with a GPU or TPU: ten minutes
  python -m experiments.device_check --interpret   # all kernels at small sizes on a CPU, not timed

Compares every kernel, with all gradients, with the float64 reference on the host: plain inputs,
inputs with gate, segments and initial state, per-channel gates, and ill-conditioned inputs. Runs it
twice to check that results are bitwise deterministic, and times it against the XLA implementation.
On a GPU it also times alternative tiles; the library uses the fastest from then on. Writes records,
prints a table, and exits with code 1 if a kernel fails.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import importlib.util
import os
import time

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from deltanet_jax.ops import testing
from deltanet_jax.ops.testing import ILL_CONDITIONED
from experiments.bench import device_kernels
from experiments.bench.timing import best_seconds
from experiments.lib import app, records
from experiments.lib.tables import table

_INTERPRET = flags.DEFINE_bool(
  "interpret", False, "Interpret all kernels on the CPU, at small sizes."
)
_ROUNDS = 5  # timed rounds, of which the fastest counts
_ONLY = flags.DEFINE_string("only", None, "Check only kernels whose name starts with this.")


def check(case: device_kernels.DeviceCase) -> dict:
  """Largest error of a case, whether it is within tolerance, and whether a second run is equal."""
  arrays, run = device_kernels.rounded(case), device_kernels.program(case, case.run)
  want = device_kernels.reference(case)
  try:
    got, again = (jax.tree.map(np.asarray, run(arrays)) for _ in range(2))
  except Exception as error:  # an exception of the compiler or device is a result too
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    return dict(passes=False, error=message, worst=None, of=None, repeats=None)
  errors = {name: testing.rel_rms(got[name], want[name]) for name in want}
  # max() ignores NaN, which is the worst error.
  worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
  ill_conditioned = case.inputs in ILL_CONDITIONED

  def limit(name):
    if ill_conditioned:
      return testing.ILL_CONDITIONED_REL_RMS[case.dtype]
    return testing.REL_RMS[case.dtype][name.startswith("d")]

  accurate = all(errors[name] <= limit(name) for name in errors)
  deterministic = all(np.array_equal(got[name], again[name]) for name in want)
  # JSON has no NaN and Inf.
  shown = errors[worst] if np.isfinite(errors[worst]) else None
  return dict(
    passes=accurate and deterministic, error=None, worst=shown, of=worst, repeats=deterministic
  )


def times(case: device_kernels.DeviceCase, rounds: int) -> dict:
  """Seconds of the kernel and of the XLA implementation, measured alternately."""
  arrays = device_kernels.rounded(case)
  programs = {}
  for name, f in dict(kernel=case.run, xla=case.xla).items():
    run = device_kernels.program(case, f)
    run(arrays)
    programs[name] = lambda run=run: run(arrays)
  seconds, _ = best_seconds(programs, rounds, 0)
  return dict(seconds=seconds["kernel"], plain_seconds=seconds["xla"])


def fastest_tiles(case: device_kernels.DeviceCase, rounds: int) -> dict[str, dict]:
  """Seconds of each kernel with its default tile and with an alternative, and which is faster.

  An alternative with wrong results is never chosen.
  """
  from pallas_kernels.common import measured_tiles
  from pallas_kernels.delta_rule.pallas_gpu.tiles import alternatives

  found = {}
  for kernel, tile in alternatives(case.dtype, case.arrays["k"].shape[-1]).items():
    with measured_tiles.override({kernel: tuple(tile)}):
      correct = check(case)["passes"]
      other = times(case, rounds)["seconds"] if correct else None
    own = times(case, rounds)["seconds"]
    chosen = correct and other < own
    found[kernel] = dict(
      tile=list(tile), seconds=other, own_seconds=own, right=correct, taken=chosen
    )
  return found


def _platforms():
  backend = jax.default_backend()
  if _INTERPRET.value:
    return ("tpu", "gpu")
  if backend not in ("gpu", "tpu"):
    raise ValueError("this machine has no GPU or TPU; --interpret runs the kernels on the CPU.")
  return (backend,)


def _tune(case, device, out):
  """Time alternative tiles, and store the faster ones where the library reads them."""
  from pallas_kernels.common import measured_tiles

  start = time.perf_counter()
  found = fastest_tiles(case, _ROUNDS)
  size = case.arrays["k"].shape[-1]
  faster = {
    measured_tiles.entry(kernel, case.dtype, size): tuple(x["tile"])
    for kernel, x in found.items()
    if x["taken"]
  }
  path = measured_tiles.write(device, faster)
  out.write(dict(device=device, tiles=case.dtype), found, time.perf_counter() - start)
  print(f"{len(faster)} of {len(found)} tiles replaced in {path}")


def show(results: list[tuple[dict, dict]]) -> str:
  """A table with one row per case."""
  header = ["kernel", "inputs", "dtype", "result", "largest error", "of", "deterministic"]
  header += ["ms", "XLA ms"]
  ms = lambda seconds: "" if seconds is None else f"{1e3 * seconds:.2f}"
  lines = []
  for key, x in results:
    error = x["error"] or ("non-finite" if x["worst"] is None else f"{x['worst']:.1e}")
    deterministic = {True: "yes", False: "NO", None: ""}[x["repeats"]]
    result = "pass" if x["passes"] else "FAIL"
    cells = [key["kernel"], key["inputs"], key["dtype"], result, error, x["of"] or ""]
    lines.append([*cells, deterministic, ms(x["seconds"]), ms(x["plain_seconds"])])
  return table(header, lines)


def main():
  if _INTERPRET.value:
    jax.config.update("jax_platforms", "cpu")
    # Nearly all of the time is compilation; without LLVM optimizations it is much shorter.
    quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", quick)
  platforms = _platforms()
  device = "interpreted" if _INTERPRET.value else jax.devices()[0].device_kind
  triton = not _INTERPRET.value and importlib.util.find_spec("jax_triton") is not None
  out = records.open("device_check")
  every = device_kernels.cases(platforms, _INTERPRET.value, triton)
  chosen = [case for case in every if case.kernel.startswith(_ONLY.value or "")]
  results = []
  for case in (bar := tqdm(chosen, unit="case")):
    bar.set_description(" ".join(case.key.values()))
    start = time.perf_counter()
    metrics = check(case)
    timed = metrics["passes"] and case.xla is not None and not _INTERPRET.value
    no_times = dict(seconds=None, plain_seconds=None)
    metrics |= times(case, _ROUNDS) if timed else no_times
    out.write(dict(device=device) | case.key, metrics, time.perf_counter() - start)
    results.append((case.key, metrics))
  print(show(results))
  if platforms == ("gpu",):
    tuned = dict(kernel="pallas_gpu", inputs="plain", dtype="bfloat16")
    for case in chosen:
      if case.key == tuned:
        _tune(case, device, out)
  failed = [key for key, metrics in results if not metrics["passes"]]
  print(f"{len(results) - len(failed)} of {len(results)} pass; all records: {out.path}")
  if failed:
    named = ", ".join(sorted({key["kernel"] for key in failed}))
    raise ValueError(f"{len(failed)} of {len(results)} checks failed: {named}.")


if __name__ == "__main__":
  app.run(main)
