"""The training step compiled for a machine of many devices that is not here."""

import re

import jax

from deltanet_jax.chips import Chip
from deltanet_jax.config import TrainConfig
from deltanet_jax.models import summarize
from deltanet_jax.train.step import make_trainer
from experiments.aot import targets
from experiments.aot.hlo import HloModule
from experiments.aot.worker import Worker, compile_lowered

# How the kernels of a mixer's operator are called.
_KERNELS = dict(
  causal_attention=r"(?<!linear_)attention",
  delta_rule="delta_rule",
  linear_attention="linear_attention",
)


def measure(cfg: TrainConfig, machine: targets.Machine) -> dict:
  """What the machine's compiler makes of one update: memory, collectives, operations, a bound.

  ValueError if the configuration does not suit the machine's mesh, RuntimeError if the compiler
  fails for another reason than too little memory.
  """
  with Worker(machine) as worker:
    metrics = worker.call(_compile, cfg, machine)
    said = worker.log()
  # What XLA writes where it can only move an array by gathering all of it on every device.
  return metrics | dict(full_gathers=len(re.findall("[Ii]nvoluntary full remat", said)))


def _compile(cfg, machine):
  trainer = make_trainer(cfg, targets.devices(machine))
  metrics = _describe(trainer, machine)
  try:
    compiled = compile_lowered(machine, trainer.lower_update)
  except jax.errors.JaxRuntimeError as error:
    said = str(error).split("\n")[0]
    if not said.startswith("RESOURCE_EXHAUSTED: "):
      raise RuntimeError(said) from None
    return metrics | dict(fits=False, error=said.removeprefix("RESOURCE_EXHAUSTED: "))
  stats, program = compiled.program.memory_analysis(), HloModule(compiled.hlo)
  memory = dict(
    arguments=stats.argument_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
    code=stats.generated_code_size_in_bytes,
  )
  total = sum(memory.values())
  traffic = dict(
    product_flops=program.product_flops(),
    kernel_flops=_kernel_flops(trainer, program),
    hbm_bytes=sum(move.bytes for move in program.moves()),
    sent_bytes=program.sent_bytes(),
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
    bound_seconds=bound_seconds(machine.chip, traffic),
    kernels=program.kernels(),
    unknown_loops=sorted(program.unknown),
  )


def _kernel_flops(trainer, program) -> float:
  """Of a device, by the mixers' own formulas: a compiler's text does not show what kernels do.

  The least that they do: masked blocks and the padding of tiles are not in the formulas.
  """
  cfg = trainer.cfg
  called = " ".join(program.kernels())
  forward = summarize(cfg.model, cfg.data.length).operator_flops
  flops = sum(n for engine, n in forward.items() if re.search(_KERNELS.get(engine, "$^"), called))
  # The backward is two forwards, and with remat there is one more.
  passes = 3 if cfg.model.remat == "none" else 4
  return passes * flops * cfg.data.batch * cfg.data.length / trainer.mesh.size


def bound_seconds(chip: Chip, x: dict) -> dict[str, float]:
  """Seconds that an update takes at least on each of a device's resources, were it never idle.

  The longest is a bound, no estimate: all products at bfloat16's peak, every array moved once per
  operation, every link busy.
  """
  return dict(
    flop=(sum(x["product_flops"].values()) + x["kernel_flops"]) / chip.peak_flops,
    hbm=x["hbm_bytes"] / chip.bandwidth,
    links=x["sent_bytes"] / chip.links,
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
