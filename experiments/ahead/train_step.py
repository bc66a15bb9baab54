"""Machines of many GPUs or TPUs that are not here, and the training step compiled for one."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pathlib
import re
import tempfile
import time

import jax
from jax.experimental import topologies

from deltanet_jax.config import DeltaNetConfig, GatedDeltaNetConfig, TrainConfig
from deltanet_jax.models import summarize
from deltanet_jax.train.step import make_trainer
from experiments import ahead_of_time as aot
from experiments.hlo_costs import Program

# Bytes of a TPU's memory. The compiler keeps a little of them, and refuses what exceeds the rest.
_TPU_MEMORY = {"v5e": 16 * 2**30, "v6e": 32 * 2**30, "v5p": 95 * 2**30}
_GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Machine:
  """A target by name: "h100x8", "a100x128", "v5e:16x16", "v5p:4x4x4"."""

  name: str
  chip: str
  topology: str  # as its compiler writes it

  @property
  def platform(self) -> str:
    return aot.TARGETS[self.chip].platform

  @property
  def memory(self) -> int:
    """Bytes of one device."""
    gpu = aot.TARGETS[self.chip].gpu
    return gpu["memory"] if gpu else _TPU_MEMORY[self.chip]

  def devices(self) -> list:
    options = dict(topology_name=self.topology)
    if gpu := aot.TARGETS[self.chip].gpu:
      options = dict(topology=self.topology, target_config=aot._GPU_CONFIG.format(**gpu))
    return topologies.get_topology_desc(platform=self.platform, **options).devices


def machine(name: str) -> Machine:
  """The machine of this name; ValueError if it is none, or its compiler is not installed."""
  gpu, tpu = re.fullmatch(r"(\w+?)x(\d+)", name), re.fullmatch(r"(\w+):\d+(x\d+)+", name)
  chip = (gpu or tpu) and (gpu or tpu)[1]
  wanted = "cuda" if gpu else "tpu"
  if chip not in aot.TARGETS or aot.TARGETS[chip].platform != wanted:
    gpus = [x for x, target in aot.TARGETS.items() if target.platform == "cuda"]
    raise ValueError(
      f"target is {name!r}, expected one of {gpus} and a number as in h100x8, or one of"
      f" {list(_TPU_MEMORY)} and a shape as in v5e:16x16."
    )
  topology = name
  if gpu:
    hosts, rest = divmod(int(gpu[2]), _GPUS_PER_HOST)
    if int(gpu[2]) < 1 or (hosts and rest):
      raise ValueError(
        f"target is {name!r}, expected 1 to {_GPUS_PER_HOST} GPUs or a multiple of them."
      )
    topology = f"1x{hosts}x{_GPUS_PER_HOST}" if hosts else f"1x1x{rest}"
  if problem := aot.missing(chip):
    raise ValueError(problem)
  return Machine(name, chip, topology)


def _prepare(platform, log):
  """Settings of the worker, before the compiler is loaded; what it logs goes to a file."""
  if platform == "tpu":
    os.environ.update(
      TPU_SKIP_MDS_QUERY="1",
      TPU_WORKER_HOSTNAMES="localhost",
      TPU_ACCELERATOR_TYPE="v5litepod-4",
      ALLOW_MULTIPLE_LIBTPU_LOAD="1",
      TPU_LOG_DIR="disabled",
      # Warnings too: compile_update looks for one.
      TPU_MIN_LOG_LEVEL="1",
      TPU_STDERR_LOG_LEVEL="1",
    )
  else:
    os.environ["PATH"] = f"{pathlib.Path(aot.ptxas()).parent}{os.pathsep}{os.environ['PATH']}"
  jax.config.update("jax_platforms", "cpu")
  os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


def compile_update(cfg: TrainConfig, target: Machine) -> dict:
  """What the target's compiler makes of one update of this run: memory, collectives, operations.

  In a process of its own, because a compiler may end it; ValueError if the run does not suit the
  machine's mesh, RuntimeError if the compiler fails for another reason than too little memory.
  """
  with tempfile.TemporaryDirectory(prefix="compile_ahead_") as folder:
    log = pathlib.Path(folder, "log")
    with concurrent.futures.ProcessPoolExecutor(
      1, multiprocessing.get_context("spawn"), _prepare, (target.platform, str(log))
    ) as pool:
      try:
        row = pool.submit(_compile, cfg, target).result()
      except concurrent.futures.process.BrokenProcessPool as error:
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((x for x in reversed(lines) if x.strip()), "no message")
        raise RuntimeError(f"the compiler ended its process: {last}") from error
    said = log.read_text(errors="replace")
  # What XLA writes where it can only move an array by gathering all of it on every device.
  return row | dict(full_gathers=len(re.findall("[Ii]nvoluntary full remat", said)))


def _compile(cfg, target):
  for mixer in cfg.model.mixers.values():
    # None would choose for this process, which has no such device; this, as the device would.
    if isinstance(mixer, DeltaNetConfig | GatedDeltaNetConfig):
      mixer.implementation = mixer.implementation or "by_platform"
  trainer = make_trainer(cfg, target.devices())
  begun = time.perf_counter()
  lowered = trainer.lower_update(lowering_platforms=(target.platform,))
  row = _describe(trainer, target) | dict(lower_seconds=time.perf_counter() - begun)
  begun, cpu_begun = time.perf_counter(), sum(os.times()[:4])
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    said = str(error).split("\n")[0]
    if not said.startswith("RESOURCE_EXHAUSTED: "):
      raise RuntimeError(said) from None
    return row | dict(fits=False, error=said.removeprefix("RESOURCE_EXHAUSTED: "))
  row |= dict(
    compile_seconds=time.perf_counter() - begun,
    compile_cpu_seconds=sum(os.times()[:4]) - cpu_begun,  # the same on a busy machine
  )
  stats, program = compiled.memory_analysis(), Program(compiled.as_text())
  memory = dict(
    arguments=stats.argument_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
    code=stats.generated_code_size_in_bytes,
  )
  total = sum(memory.values())
  return row | dict(
    memory=memory | dict(total=total),
    fits=total <= target.memory,
    collectives={
      kind: dict(count=n, bytes=size) for kind, (n, size) in program.collectives().items()
    },
    product_flops=program.product_flops(),
    kernels=program.kernels(),
    unknown_loops=sorted(program.unknown),
  )


def _describe(trainer, target):
  cfg = trainer.cfg
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  summary = summarize(cfg.model, cfg.data.length)
  return dict(
    target=target.name,
    platform=target.platform,
    devices=trainer.mesh.size,
    mesh=dict(trainer.mesh.shape),
    parameters=summary.parameters,
    batch=cfg.data.batch,
    length=cfg.data.length,
    grad_accum=cfg.grad_accum,
    loss_chunk=cfg.loss_chunk,
    remat=cfg.model.remat,
    # Backward costs twice the forward; what is computed again is not counted.
    model_flops=3 * summary.flops * cfg.data.batch * cfg.data.length,
    argument_bytes=size(trainer.state_shapes()) + size(trainer.batch_shapes()),
    device_memory=target.memory,
  )
