"""Compile a training step AOT for a machine of many devices, and compute its roofline bound."""

import re

import jax

from deltanet_jax.chips import Chip
from deltanet_jax.config import TrainConfig
from deltanet_jax.models import summarize
from deltanet_jax.train.step import make_trainer
from experiments.aot import targets
from experiments.aot.hlo import HloModule
from experiments.aot.worker import Worker, compile_lowered

# Operator -> regular expression of its kernels' names.
_KERNELS = dict(
  causal_attention=r"(?<!linear_)attention",
  delta_rule="delta_rule",
  linear_attention="linear_attention",
)


def measure(cfg: TrainConfig, machine: targets.Machine) -> dict:
  """Memory, collectives, FLOPs, HBM traffic and roofline times of one compiled update.

  Raises:
    ValueError: the configuration does not match the machine's mesh.
    RuntimeError: the compiler fails for a reason other than out of memory.
  """
  with Worker(machine) as worker:
    metrics = worker.call(_compile, cfg, machine)
    log = worker.log()
  # XLA's warning where it reshards an array by gathering all of it on every device.
  warnings = re.findall("[Ii]nvoluntary full remat", log)
  return metrics | dict(involuntary_full_rematerializations=len(warnings))


def _compile(cfg, machine):
  trainer = make_trainer(cfg, targets.devices(machine))
  metrics = _describe(trainer, machine)
  try:
    compiled = compile_lowered(machine, trainer.lower_update)
  except jax.errors.JaxRuntimeError as error:
    message = str(error).split("\n")[0]
    if not message.startswith("RESOURCE_EXHAUSTED: "):
      raise RuntimeError(message) from None
    return metrics | dict(fits=False, error=message.removeprefix("RESOURCE_EXHAUSTED: "))
  stats, program = compiled.program.memory_analysis(), HloModule(compiled.hlo)
  memory = dict(
    arguments=stats.argument_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
    code=stats.generated_code_size_in_bytes,
  )
  total = sum(memory.values())
  traffic = dict(
    matmul_flops=program.matmul_flops(),
    kernel_flops=_kernel_flops(trainer, program),
    hbm_bytes=sum(move.bytes for move in program.moves()),
    interconnect_bytes=program.interconnect_bytes(),
  )
  return metrics | dict(
    lower_seconds=compiled.lower_seconds.wall,
    compile_seconds=compiled.compile_seconds.wall,
    compile_cpu_seconds=compiled.compile_seconds.cpu,
    memory=memory | dict(total=total),
    fits=total <= machine.chip.memory,
    collectives={
      kind: dict(count=n, bytes=size) for kind, (n, size) in program.collectives().items()
    },
    **traffic,
    roofline_seconds=roofline_seconds(machine.chip, traffic),
    kernels=program.kernels(),
    unknown_trip_counts=sorted(program.unknown_trip_counts),
  )


def _kernel_flops(trainer, program) -> float:
  """FLOPs of all kernels on one device, from the mixers' formulas: HLO hides what kernels compute.

  A lower bound: the formulas exclude masked blocks and tile padding.
  """
  cfg = trainer.cfg
  called = " ".join(program.kernels())
  forward = summarize(cfg.model, cfg.data.length).operator_flops
  flops = sum(n for name, n in forward.items() if re.search(_KERNELS.get(name, "$^"), called))
  # The backward pass costs two forward passes, remat a third one.
  passes = 3 if cfg.model.remat == "none" else 4
  return passes * flops * cfg.data.batch * cfg.data.length / trainer.mesh.size


def roofline_seconds(chip: Chip, x: dict) -> dict[str, float]:
  """Roofline model: minimum seconds per update on each resource of a device, fully utilized.

  Compute at the peak bfloat16 rate, HBM traffic at full bandwidth, collectives at full
  interconnect bandwidth. The maximum is a lower bound on the time of an update, not an estimate.
  """
  return dict(
    compute=(sum(x["matmul_flops"].values()) + x["kernel_flops"]) / chip.peak_flops,
    hbm=x["hbm_bytes"] / chip.bandwidth,
    interconnect=x["interconnect_bytes"] / chip.links,
  )


def _describe(trainer, machine):
  cfg = trainer.cfg
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  summary = summarize(cfg.model, cfg.data.length)
  return dict(
    platform=machine.platform,
    devices=trainer.mesh.size,
    mesh=dict(trainer.mesh.shape),
    parameters=summary.parameters,
    # Backward is twice the forward; rematerialization is not counted.
    model_flops=3 * summary.flops * cfg.data.batch * cfg.data.length,
    argument_bytes=size(trainer.state_shapes()) + size(trainer.batch_shapes()),
    device_memory=machine.chip.memory,
  )
