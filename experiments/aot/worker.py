"""AOT compilation in a worker process, for a machine that is not attached.

One process per machine: libtpu and XLA read their options once, and may abort the process.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deltanet_jax.ops.dispatch import compiling_for
from experiments.aot.targets import Machine, check_installed, devices, ptxas
from pallas_kernels.common.gpu import compiling_for_gpu

_DUMP = "EXPERIMENTS_AOT_DUMP"  # environment variable in the worker: folder of compiler dumps


def _prepare(machine, folder, dump):
  """Set the worker's environment, before a compiler is loaded."""
  files = f"{folder}/dump"
  os.makedirs(files)
  if machine.platform == "tpu":
    settings = dict(
      TPU_SKIP_MDS_QUERY="1",
      TPU_WORKER_HOSTNAMES="localhost",
      TPU_ACCELERATOR_TYPE="v5litepod-4",
      ALLOW_MULTIPLE_LIBTPU_LOAD="1",
      TPU_LOG_DIR="disabled",
      # Include warnings: one of them reports involuntary full rematerialization.
      TPU_MIN_LOG_LEVEL="1",
      TPU_STDERR_LOG_LEVEL="1",
    )
    if dump:
      settings["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={files} --xla_jf_dump_llo_text=true"
  else:
    # XLA and Triton use the ptxas whose register counts are reported. Triton's bundled ptxas is
    # newer, and Triton would emit a PTX version that XLA's ptxas cannot assemble.
    settings = dict(
      PATH=f"{pathlib.Path(ptxas()).parent}{os.pathsep}{os.environ['PATH']}",
      TRITON_PTXAS_PATH=ptxas(),
      TRITON_PTXAS_BLACKWELL_PATH=ptxas(),
    )
    if dump:
      settings["XLA_FLAGS"] = f"--xla_dump_to={files} --xla_dump_hlo_as_text"
      settings["JAX_TRITON_DUMP_DIR"] = files
  os.environ.update(settings, **{_DUMP: files})
  jax.config.update("jax_platforms", "cpu")
  # The compilers log to stderr.
  os.dup2(os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


class Worker:
  """A process that compiles for one machine; restarted after a crash.

  Args:
    dump: let the compilers dump files about each kernel; large for a large program.
  """

  def __init__(self, machine: Machine, dump: bool = False):
    check_installed([machine.platform])
    self._machine, self._dump, self._pool = machine, dump, None

  def __enter__(self):
    self._folder = tempfile.mkdtemp(prefix="aot_")
    return self

  def __exit__(self, *_):
    if self._pool:
      self._pool.shutdown()
    shutil.rmtree(self._folder, ignore_errors=True)

  def call(self, function, *args):
    """Run function(*args) in the worker; RuntimeError if the compiler aborts the process."""
    if self._pool is None:
      folder = tempfile.mkdtemp(dir=self._folder)
      self._log = pathlib.Path(folder, "log")
      self._pool = concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), _prepare, (self._machine, folder, self._dump)
      )
    try:
      return self._pool.submit(function, *args).result()
    except concurrent.futures.process.BrokenProcessPool as error:
      self._pool = None
      last = next((x for x in reversed(self.log().split("\n")) if x.strip()), "no message")
      raise RuntimeError(f"the compiler aborted its process: {last}") from error

  def log(self) -> str:
    """stderr of the worker: the compilers' log."""
    return self._log.read_text(errors="replace") if self._log.exists() else ""


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A program compiled for a machine, and the files that the compilers dumped."""

  machine: Machine
  program: jax.stages.Compiled
  files: tuple[pathlib.Path, ...]
  lower_seconds: "Seconds"
  compile_seconds: "Seconds"
  grids: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # of Pallas kernels

  @property
  def hlo(self) -> str:
    return self.program.as_text()


@dataclasses.dataclass(frozen=True)
class Seconds:
  wall: float
  cpu: float  # includes ptxas; unlike wall time, independent of the load of the machine

  @classmethod
  def now(cls):
    return cls(time.perf_counter(), sum(os.times()[:4]))

  def __sub__(self, start):
    return Seconds(self.wall - start.wall, self.cpu - start.cpu)


@contextlib.contextmanager
def tracing_for(machine: Machine):
  """Trace as on the machine: with the implementations of its platform and the tiles of its chip."""
  gpu = machine.chip.nvidia
  tiles_of_chip = compiling_for_gpu(gpu.device_name) if gpu else contextlib.nullcontext()
  with compiling_for(machine.platform), tiles_of_chip:
    yield


def compile_lowered(machine: Machine, lower: Callable[..., jax.stages.Lowered]) -> Compiled:
  """Compile lower(lowering_platforms=...), traced as on the machine. Call it in a `Worker`."""
  dump = pathlib.Path(os.environ[_DUMP])
  shutil.rmtree(dump)
  dump.mkdir()
  start = Seconds.now()
  with tracing_for(machine):
    lowered = lower(lowering_platforms=(machine.lowering,))
  between = Seconds.now()
  program = lowered.compile()
  end = Seconds.now()
  files = tuple(p for p in dump.rglob("*") if p.is_file())
  return Compiled(machine, program, files, between - start, end - between)


def compile_function(
  machine: Machine, function: Callable, args: tuple, donate: tuple[int, ...] = ()
) -> Compiled:
  """Compile function(*args) for one chip. Call it in a `Worker`.

  Args:
    args: trees of ShapeDtypeStructs.
    donate: indices of donated arguments.
  """
  chip = Mesh(np.array(devices(machine)[:1]), ("x",))
  sharding = NamedSharding(chip, PartitionSpec())
  with_sharding = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  grids = {}

  def lower(**options):
    traced = jax.jit(function, donate_argnums=donate).trace(*jax.tree.map(with_sharding, args))
    grids.update(_grids(traced.jaxpr))
    return traced.lower(**options)

  return dataclasses.replace(compile_lowered(machine, lower), grids=grids)


def _grids(jaxpr):
  """(name, grid) of every Pallas kernel."""
  for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if eqn.primitive.name == "pallas_call":
      yield eqn.params["name"], eqn.params["grid_mapping"].grid
    else:
      for inner in jaxprs_in_params(eqn.params):
        yield from _grids(inner)
