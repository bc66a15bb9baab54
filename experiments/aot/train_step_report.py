"""Compiles the training step for a machine that is not here, and says whether it fits.

  python -m experiments.aot.train_step_report --config=experiments/configs/lm.py:deltanet-1.3b \\
    --target=h100x8
  python -m experiments.aot.train_step_report --config=experiments/configs/lm.py:deltanet-340m \\
    --target=v5e:16x16 --target=v5p:4x4x4 --config.mesh.data=16 --config.mesh.fsdp=-1

Memory of each device, collectives, operations: what the real compilers make of the same step that
`experiments.train` runs, and of the device's own kernels. Needs `pip install -e .[aot]`, no
accelerator. Nothing is run: no figure here is a time.
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
  "target", None, "Machine: h100x8, a100x8, h100x128, v5e:16x16, v5p:4x4x4; repeat for several."
)
# A GPU's memory that jax takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_TAKEN = 0.75


def key_of(config: str, cfg: TrainConfig, machine: targets.Machine) -> dict:
  """What names a row; -1 of the mesh is what it stands for."""
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


def _verdict(x):
  share = x["memory"]["total"] / x["device_memory"]
  if not x["fits"]:
    return f"DOES NOT FIT: it needs {share:.0%} of the {_gb(x['device_memory'])} GB a device has."
  fraction = ""
  if x["platform"] == "gpu" and share > _TAKEN:
    fraction = " Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: jax takes only 0.75 by itself."
  return f"It fits: {share:.0%} of the {_gb(x['device_memory'])} GB a device has.{fraction}"


def show(key: dict, x: dict) -> str:
  """One row in sentences and two small tables."""
  lines = [
    f"{key['config']} on {key['target']}: {x['devices']} devices, mesh {key['mesh'] or 'of one'}",
    f"{x['parameters']:,} parameters; {key['batch']} rows of {key['length']} tokens in"
    f" {key['grad_accum']} micro-batches, loss_chunk {key['loss_chunk']}, remat {key['remat']}",
  ]
  if "error" in x:
    return "\n".join([*lines, f"DOES NOT FIT. The compiler: {x['error']}"])
  ways = x["mesh"]["fsdp"] * x["mesh"]["tensor"]
  excess = x["memory"]["arguments"] * ways / x["argument_bytes"]
  products = x["product_flops"]
  by_dtype = "  ".join(f"{dtype} {n:.3g}" for dtype, n in products.items())
  collectives = [[kind, f"{y['count']:,}", _gb(y["bytes"])] for kind, y in x["collectives"].items()]
  lines += [
    _verdict(x),
    table(["memory of a device", "GB"], [[k, _gb(n)] for k, n in x["memory"].items()]),
    f"arguments: {excess:.3f} x the {_gb(x['argument_bytes'])} GB of weights, moments and batch"
    f" over {ways} devices",
    table(["collectives of an update", "count", "GB"], collectives or [["none", "", ""]]),
    "kernels: " + ("  ".join(f"{name} {n:,}" for name, n in x["kernels"].items()) or "none"),
    f"FLOP of an update: {x['model_flops']:.3g} of the model (3 x forward);"
    f" {sum(products.values()) * x['devices']:.3g} in products outside kernels, with those that"
    f" remat repeats (each device: {by_dtype}), {x['kernel_flops'] * x['devices']:.3g} in kernels",
    f"No update is faster than {max(x['bound_seconds'].values()):.3g} s, a bound and no speed:"
    f" {', '.join(f'{name} {n:.3g}' for name, n in x['bound_seconds'].items())}"
    f" ({_gb(x['hbm_bytes'])} GB of HBM traffic, {_gb(x['sent_bytes'])} GB sent, each device)",
    f"lowered in {x['lower_seconds']:.0f} s, compiled in {x['compile_seconds']:.0f} s"
    f" ({x['compile_cpu_seconds']:.0f} s of CPU)",
  ]
  if x["unknown_loops"]:
    lines.append(f"Counted for one round only, their number not found: {x['unknown_loops']}.")
  if x["full_gathers"]:
    lines.append(f"WARNING: {x['full_gathers']} arrays are gathered whole to be split anew.")
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
    bar.set_description(f"compiling for {machine.name}, minutes for a large one")
    key = key_of(config_file.name(), cfg, machine)
    if out.has(key):
      tqdm.write(f"{machine.name}: has a row from this commit; --again compiles it anew")
      continue
    start = time.perf_counter()
    metrics = train_step.measure(cfg, machine)
    out.write(key, metrics, time.perf_counter() - start)
    tqdm.write("\n" + show(key, metrics))
  print(f"\nall rows: {out.path}")


if __name__ == "__main__":
  app.run(main, (ValueError, FileNotFoundError, RuntimeError), config_file.parse)
