"""The training step compiled for a machine of many devices that is not here."""

import re

import jax

from deltanet_jax.config import TrainConfig
from deltanet_jax.models import summarize
from deltanet_jax.train.step import make_trainer
from experiments.ahead import targets
from experiments.ahead.hlo import Program
from experiments.ahead.worker import Worker, compile_lowered


def measure(cfg: TrainConfig, machine: targets.Machine) -> dict:
  """What the machine's compiler makes of one update: memory, collectives, operations.

  ValueError if the configuration does not suit the machine's mesh, RuntimeError if the compiler
  fails for another reason than too little memory.
  """
  with Worker(machine) as worker:
    figures = worker.call(_compile, cfg, machine)
    said = worker.log()
  # What XLA writes where it can only move an array by gathering all of it on every device.
  return figures | dict(full_gathers=len(re.findall("[Ii]nvoluntary full remat", said)))


def _compile(cfg, machine):
  trainer = make_trainer(cfg, targets.devices(machine))
  figures = _describe(trainer, machine)
  try:
    compiled = compile_lowered(machine, trainer.lower_update)
  except jax.errors.JaxRuntimeError as error:
    said = str(error).split("\n")[0]
    if not said.startswith("RESOURCE_EXHAUSTED: "):
      raise RuntimeError(said) from None
    return figures | dict(fits=False, error=said.removeprefix("RESOURCE_EXHAUSTED: "))
  stats, program = compiled.program.memory_analysis(), Program(compiled.hlo)
  memory = dict(
    arguments=stats.argument_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
    code=stats.generated_code_size_in_bytes,
  )
  total = sum(memory.values())
  return figures | dict(
    lower_seconds=compiled.lower_seconds.wall,
    compile_seconds=compiled.compile_seconds.wall,
    compile_cpu_seconds=compiled.compile_seconds.cpu,
    memory=memory | dict(total=total),
    fits=total <= machine.chip.memory,
    collectives={
      kind: dict(count=n, bytes=size) for kind, (n, size) in program.collectives().items()
    },
    product_flops=program.product_flops(),
    kernels=program.kernels(),
    unknown_loops=sorted(program.unknown),
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
    # Backward costs twice the forward; what is computed again is not counted.
    model_flops=3 * summary.flops * cfg.data.batch * cfg.data.length,
    argument_bytes=size(trainer.state_shapes()) + size(trainer.batch_shapes()),
    device_memory=machine.chip.memory,
  )
