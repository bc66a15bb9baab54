"""Compile a training step AOT for a machine that is not attached; report whether it fits.

  python -m experiments.aot.train_step_report --config=experiments/configs/lm.py:deltanet-1.3b \\
    --target=h100x8
  python -m experiments.aot.train_step_report --config=experiments/configs/lm.py:deltanet-340m \\
    --target=v5e:16x16 --target=v5p:4x4x4 --config.mesh.data=16 --config.mesh.fsdp=-1

Compiles the same step as `experiments.train`, including the device's kernels, with the real TPU or
GPU compiler, and reports memory per device, collective bytes, FLOPs, HBM traffic and the roofline
bound. Nothing is run, so there are no measured times. Needs `pip install -e .[aot]`, no
accelerator.
"""

import math
import time

import jax
from absl import flags
from tqdm import tqdm

from deltanet_jax.config import TrainConfig
from deltanet_jax.models import count_parameters
from experiments.aot import targets, train_step
from experiments.lib import app, config_file, records
from experiments.lib.tables import table

_TARGETS = flags.DEFINE_multi_string(
  "target", None, "Machine: h100x8, a100x8, h100x128, v5e:16x16, v5p:4x4x4; repeatable."
)
# Fraction of GPU memory that JAX preallocates unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.
_PREALLOCATED = 0.75


def key_of(config: str, cfg: TrainConfig, machine: targets.Machine) -> dict:
  """Record key; a mesh size of -1 is resolved."""
  return dict(
    config=config,
    parameters=count_parameters(cfg.model),
    target=machine.name,
    mesh=" ".join(f"{axis} {n}" for axis, n in _mesh(cfg, machine.size).items() if n != 1),
    batch=cfg.data.batch,
    length=cfg.data.length,
    grad_accum=cfg.grad_accum,
    loss_chunk=cfg.loss_chunk,
    remat=cfg.model.remat,
  )


def _mesh(cfg, devices):
  sizes = cfg.mesh.sizes()
  given = math.prod(n for n in sizes.values() if n != -1)
  return {axis: devices // given if n == -1 else n for axis, n in sizes.items()}


def _gb(size):
  return f"{size / 1e9:.2f}"


def _memory_verdict(x):
  share = x["memory"]["total"] / x["device_memory"]
  if not x["fits"]:
    return f"DOES NOT FIT: needs {share:.0%} of the {_gb(x['device_memory'])} GB per device."
  fraction = ""
  if x["platform"] == "gpu" and share > _PREALLOCATED:
    fraction = " Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: JAX uses only 0.75 by default."
  return f"Fits: {share:.0%} of the {_gb(x['device_memory'])} GB per device.{fraction}"


def show(key: dict, x: dict) -> str:
  """One record as text with two small tables."""
  lines = [
    f"{key['config']} on {key['target']}: {x['devices']} devices, mesh {key['mesh'] or '1'}",
    f"{x['parameters']:,} parameters; batch size {key['batch']}, sequence length {key['length']},"
    f" grad_accum {key['grad_accum']}, loss_chunk {key['loss_chunk']}, remat {key['remat']}",
  ]
  if "error" in x:
    return "\n".join([*lines, f"DOES NOT FIT. Compiler error: {x['error']}"])
  shards = x["mesh"]["fsdp"] * x["mesh"]["tensor"]
  excess = x["memory"]["arguments"] * shards / x["argument_bytes"]
  matmuls = x["matmul_flops"]
  by_dtype = "  ".join(f"{dtype} {n:.3g}" for dtype, n in matmuls.items())
  collectives = [[kind, f"{y['count']:,}", _gb(y["bytes"])] for kind, y in x["collectives"].items()]
  lines += [
    _memory_verdict(x),
    table(["memory per device", "GB"], [[k, _gb(n)] for k, n in x["memory"].items()]),
    f"arguments: {excess:.3f}x the {_gb(x['argument_bytes'])} GB of weights, optimizer state and"
    f" batch, sharded over {shards} devices",
    table(["collectives per update", "count", "GB"], collectives or [["none", "", ""]]),
    "kernel calls: " + ("  ".join(f"{name} {n:,}" for name, n in x["kernels"].items()) or "none"),
    f"FLOPs per update: {x['model_flops']:.3g} of the model (3x forward);"
    f" {sum(matmuls.values()) * x['devices']:.3g} in matmuls outside kernels, including remat"
    f" (per device: {by_dtype}), {x['kernel_flops'] * x['devices']:.3g} in kernels",
    f"Roofline lower bound {max(x['roofline_seconds'].values()):.3g} s per update:"
    f" {', '.join(f'{name} {n:.3g}' for name, n in x['roofline_seconds'].items())}"
    f" (per device {_gb(x['hbm_bytes'])} GB HBM traffic, {_gb(x['interconnect_bytes'])} GB sent)",
    f"lowered in {x['lower_seconds']:.0f} s, compiled in {x['compile_seconds']:.0f} s"
    f" ({x['compile_cpu_seconds']:.0f} s of CPU)",
  ]
  if x["unknown_trip_counts"]:
    lines.append(f"Loops of unknown trip count, counted once: {x['unknown_trip_counts']}.")
  if gathered := x["involuntary_full_rematerializations"]:
    lines.append(
      f"WARNING: {gathered} involuntary full rematerializations (arrays gathered to be resharded)."
    )
  return "\n".join(lines)


def main():
  cfg = config_file.CONFIG.value
  if cfg is None or not _TARGETS.value:
    raise ValueError("--config and --target are needed; see --help")
  jax.config.update("jax_platforms", "cpu")
  cfg.validate()
  machines = [targets.machine(name) for name in _TARGETS.value]
  targets.check_installed([machine.platform for machine in machines])
  out = records.open("train_step_report")
  for machine in (bar := tqdm(machines, unit="machine")):
    bar.set_description(f"compiling for {machine.name} (large machines take minutes)")
    key = key_of(config_file.name(), cfg, machine)
    if out.has(key):
      tqdm.write(f"{machine.name}: already recorded at this commit; --again recompiles it")
      continue
    start = time.perf_counter()
    metrics = train_step.measure(cfg, machine)
    out.write(key, metrics, time.perf_counter() - start)
    tqdm.write("\n" + show(key, metrics))
  print(f"\nall records: {out.path}")


if __name__ == "__main__":
  app.run(main, (ValueError, FileNotFoundError, RuntimeError), config_file.parse)
