"""Proves the kernels on this machine's GPU or TPU: right, repeatable, and how fast.

  python -m experiments.device_check               # on a machine with a GPU or TPU, ten minutes
  python -m experiments.device_check --interpret   # all kernels at small sizes on a CPU: no times

Every kernel, with all gradients, plain inputs, inputs with gate, documents and state, gates of key
channels, and inputs that amplify rounding, against the float64 definition on the host; twice, for
equal bits; its time beside plain XLA's; on a GPU also other tiles, the fastest of which the library
then takes. Rows of results, one table, exit code 1 if a kernel fails.
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

_INTERPRET = flags.DEFINE_bool("interpret", False, "Run all kernels on the CPU, at small sizes.")
_ROUNDS = 5  # timed; the best one counts
_ONLY = flags.DEFINE_string("only", None, "Check only kernels whose name begins so.")


def check(case: device_kernels.DeviceCase) -> dict:
  """Errors of one case and whether they are within its dtype's tolerance; bits of a second run."""
  arrays, run = device_kernels.rounded(case), device_kernels.program(case, case.run)
  want = device_kernels.truth(case)
  try:
    got, again = (jax.tree.map(np.asarray, run(arrays)) for _ in range(2))
  except Exception as error:  # whatever a compiler or device raises is the result
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return dict(passes=False, error=said, worst=None, of=None, repeats=None)
  errors = {name: testing.rel_rms(got[name], want[name]) for name in want}
  # NaN is the worst of all, and no maximum.
  worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
  ugly = case.inputs in ILL_CONDITIONED

  def limit(name):
    if ugly:
      return testing.ILL_CONDITIONED_REL_RMS[case.dtype]
    return testing.REL_RMS[case.dtype][name.startswith("d")]

  right = all(errors[name] <= limit(name) for name in errors)
  repeats = all(np.array_equal(got[name], again[name]) for name in want)
  # None for what JSON cannot hold.
  shown = errors[worst] if np.isfinite(errors[worst]) else None
  return dict(passes=right and repeats, error=None, worst=shown, of=worst, repeats=repeats)


def times(case: device_kernels.DeviceCase, rounds: int) -> dict:
  """Seconds of the kernel and of plain XLA, in turn."""
  arrays = device_kernels.rounded(case)
  programs = {}
  for name, f in dict(kernel=case.run, plain=case.plain).items():
    run = device_kernels.program(case, f)
    run(arrays)
    programs[name] = lambda run=run: run(arrays)
  seconds, _ = best_seconds(programs, rounds, 0)
  return dict(seconds=seconds["kernel"], plain_seconds=seconds["plain"])


def fastest_tiles(case: device_kernels.DeviceCase, rounds: int) -> dict[str, dict]:
  """Kernel -> seconds with the chip's tile and with its alternative, and which is taken.

  An alternative whose results are wrong is never taken.
  """
  from pallas_kernels.common import measured_tiles
  from pallas_kernels.delta_rule.pallas_gpu.tiles import alternatives

  found = {}
  for kernel, tile in alternatives(case.dtype, case.arrays["k"].shape[-1]).items():
    with measured_tiles.forced({kernel: tuple(tile)}):
      right = check(case)["passes"]
      other = times(case, rounds)["seconds"] if right else None
    own = times(case, rounds)["seconds"]
    taken = right and other < own
    found[kernel] = dict(tile=list(tile), seconds=other, own_seconds=own, right=right, taken=taken)
  return found


def _platforms():
  backend = jax.default_backend()
  if _INTERPRET.value:
    return ("tpu", "gpu")
  if backend not in ("gpu", "tpu"):
    raise ValueError("there is no GPU or TPU here; --interpret runs the kernels on the CPU.")
  return (backend,)


def _tune(case, device, out):
  """Times other tiles, and writes those that win where the library looks for them."""
  from pallas_kernels.common import measured_tiles

  start = time.perf_counter()
  found = fastest_tiles(case, _ROUNDS)
  size = case.arrays["k"].shape[-1]
  taken = {
    measured_tiles.name(kernel, case.dtype, size): tuple(x["tile"])
    for kernel, x in found.items()
    if x["taken"]
  }
  measured_tiles.write(device, taken)
  out.write(dict(device=device, tiles=case.dtype), found, time.perf_counter() - start)
  print(f"{len(taken)} of {len(found)} tiles are replaced: {measured_tiles.FILE}")


def show(rows: list[tuple[dict, dict]]) -> str:
  """A line per case."""
  header = ["kernel", "inputs", "dtype", "result", "largest error", "of", "bits", "ms", "plain ms"]
  ms = lambda seconds: "" if seconds is None else f"{1e3 * seconds:.2f}"
  lines = []
  for key, x in rows:
    error = x["error"] or ("not finite" if x["worst"] is None else f"{x['worst']:.1e}")
    bits = {True: "equal", False: "DIFFER", None: ""}[x["repeats"]]
    result = "pass" if x["passes"] else "FAIL"
    lines.append([key["kernel"], key["inputs"], key["dtype"], result, error, x["of"] or "", bits])
    lines[-1] += [ms(x["seconds"]), ms(x["plain_seconds"])]
  return table(header, lines)


def main():
  if _INTERPRET.value:
    jax.config.update("jax_platforms", "cpu")
    # Nearly all of the time is compiling, which without LLVM's optimiser takes a fraction of it.
    quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", quick)
  platforms = _platforms()
  device = "interpreted" if _INTERPRET.value else jax.devices()[0].device_kind
  triton = not _INTERPRET.value and importlib.util.find_spec("jax_triton") is not None
  out = records.open("device_check")
  every = device_kernels.cases(platforms, _INTERPRET.value, triton)
  chosen = [case for case in every if case.kernel.startswith(_ONLY.value or "")]
  rows = []
  for case in (bar := tqdm(chosen, unit="case")):
    bar.set_description(" ".join(case.key.values()))
    start = time.perf_counter()
    metrics = check(case)
    timed = metrics["passes"] and case.plain is not None and not _INTERPRET.value
    no_times = dict(seconds=None, plain_seconds=None)
    metrics |= times(case, _ROUNDS) if timed else no_times
    out.write(dict(device=device) | case.key, metrics, time.perf_counter() - start)
    rows.append((case.key, metrics))
  print(show(rows))
  if platforms == ("gpu",):
    tuned = dict(kernel="pallas_gpu", inputs="plain", dtype="bfloat16")
    for case in chosen:
      if case.key == tuned:
        _tune(case, device, out)
  failed = [key for key, metrics in rows if not metrics["passes"]]
  print(f"{len(rows) - len(failed)} of {len(rows)} pass; all rows: {out.path}")
  if failed:
    named = ", ".join(sorted({key["kernel"] for key in failed}))
    raise ValueError(f"{len(failed)} of {len(rows)} checks failed: {named}.")


if __name__ == "__main__":
  app.run(main)
