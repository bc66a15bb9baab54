"""Compiles functions for a TPU or GPU that is not there, and reads what the compilers say.

A worker process per target, because libtpu and XLA read their dump options once. Static counts:
nothing here has run on the hardware.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import glob
import importlib.util
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core}
  shared_memory_per_block_optin: {shared_per_block}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {ghz}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 patch: 0 }}
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""
_A100 = dict(
  name="NVIDIA A100-SXM4-80GB", major=8, cores=108, fpus=64, ghz=1.41, l2=40 * 2**20,
  shared_per_core=164 * 2**10, shared_per_block=163 * 2**10,
  bandwidth=2_039_000_000_000, memory=85_000_000_000,
)  # fmt: skip
_H100 = dict(
  name="NVIDIA H100 80GB HBM3", major=9, cores=132, fpus=128, ghz=1.98, l2=50 * 2**20,
  shared_per_core=228 * 2**10, shared_per_block=227 * 2**10,
  bandwidth=3_352_000_000_000, memory=84_900_000_000,
)  # fmt: skip
_B200 = _H100 | dict(
  name="NVIDIA B200", major=10, cores=148, ghz=1.965, l2=132_644_864,
  bandwidth=7_700_000_000_000, memory=190_000_000_000,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
  """A chip to compile for: `topology` of libtpu and `vmem`, or `gpu` facts and ptxas' `arch`."""

  platform: str  # as in lowering_platforms
  topology: str = "1x1x1"
  vmem: int | None = None  # bytes, of a core
  gpu: dict | None = None
  arch: str | None = None

  @property
  def capability(self) -> int | None:
    return self.gpu and self.gpu["major"] * 10


TARGETS = {
  "v5e": Target("tpu", "v5e:2x2", vmem=128 * 2**20),
  "v6e": Target("tpu", "v6e:2x2", vmem=128 * 2**20),
  "v5p": Target("tpu", "v5p:2x2x1", vmem=64 * 2**20),
  "h100": Target("cuda", gpu=_H100, arch="sm_90a"),
  "a100": Target("cuda", gpu=_A100, arch="sm_80"),
  "b200": Target("cuda", gpu=_B200, arch="sm_100a"),
}


def ptxas() -> str | None:
  """Path of the assembler in the nvidia-cuda-nvcc-cu12 wheel."""
  found = glob.glob(f"{sysconfig.get_path('purelib')}/nvidia/cuda_nvcc/bin/ptxas")
  return found[0] if found else None


def missing(target: str) -> str | None:
  """One sentence that names the wheels `target` lacks and how to get them, or None."""
  has = lambda module: importlib.util.find_spec(module) is not None
  needs = {"libtpu": has("libtpu")}
  if TARGETS[target].platform == "cuda":
    needs = {
      "jax-cuda12-plugin": has("jax_cuda12_plugin"),
      "jax-cuda12-pjrt": has("jax_plugins") and has("jax_plugins.xla_cuda12"),
      "nvidia-cuda-nvcc-cu12": ptxas() is not None,
      "jax-triton": has("jax_triton"),
      "triton": has("triton"),
    }
  absent = [wheel for wheel, there in needs.items() if not there]
  if not absent:
    return None
  return f"compiling for {target} needs {', '.join(absent)}: pip install -e .[aot]"


def _prepare(target, folder):
  """Settings of a worker, before its first compilation."""
  dump = f"{folder}/dump"
  os.makedirs(dump)
  settings = dict(
    TF_CPP_MIN_LOG_LEVEL="3",
    XLA_FLAGS=f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
    JAX_TRITON_DUMP_DIR=dump,
  )
  if TARGETS[target].platform == "tpu":
    settings = dict(
      TPU_SKIP_MDS_QUERY="1",
      TPU_WORKER_HOSTNAMES="localhost",
      TPU_ACCELERATOR_TYPE="v5litepod-4",
      ALLOW_MULTIPLE_LIBTPU_LOAD="1",
      TPU_LOG_DIR="disabled",
      LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true",
    )
  else:
    # XLA and Triton use the ptxas whose registers are reported. Triton's own is newer, and it would
    # write a PTX version that XLA's cannot assemble.
    settings["PATH"] = f"{pathlib.Path(ptxas()).parent}{os.pathsep}{os.environ['PATH']}"
    settings |= dict(TRITON_PTXAS_PATH=ptxas(), TRITON_PTXAS_BLACKWELL_PATH=ptxas())
  os.environ.update(settings)
  jax.config.update("jax_platforms", "cpu")
  # The compilers log there; the last line is shown when one of them ends the process.
  os.dup2(os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


class Worker:
  """A process that compiles for one target; a new one takes over after a crash."""

  def __init__(self, target: str):
    if problem := missing(target):
      raise RuntimeError(problem)
    self._target, self._pool = target, None

  def __enter__(self):
    self._folder = tempfile.mkdtemp(prefix="ahead_of_time_")
    return self

  def __exit__(self, *_):
    if self._pool:
      self._pool.shutdown()
    shutil.rmtree(self._folder, ignore_errors=True)

  def call(self, function, *args):
    """function(*args) in the worker; RuntimeError if the compiler ends the process."""
    if self._pool is None:
      folder = tempfile.mkdtemp(dir=self._folder)
      self._log = pathlib.Path(folder, "log")
      self._pool = concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), _prepare, (self._target, folder)
      )
    try:
      return self._pool.submit(function, *args).result()
    except concurrent.futures.process.BrokenProcessPool as error:
      self._pool = None
      lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
      last = next((x for x in reversed(lines) if x.strip()), "no message")
      raise RuntimeError(f"the compiler ended its process: {last}") from error


@functools.cache
def _sharding(target):
  chip = TARGETS[target]
  options = dict(topology_name=chip.topology)
  if chip.gpu:
    options = dict(topology=chip.topology, target_config=_GPU_CONFIG.format(**chip.gpu))
  devices = topologies.get_topology_desc(platform=chip.platform, **options).devices
  return NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A program compiled for `target`, and the files the compilers wrote about it."""

  target: str
  hlo: str
  grids: dict[str, tuple[int, ...]]  # of every Pallas kernel
  files: tuple[pathlib.Path, ...]
  seconds: float
  cpu_seconds: float  # with those of ptxas; unlike seconds, the same on a busy machine


def compile_for(target: str, function, args: tuple, donate: tuple[int, ...] = ()) -> Compiled:
  """Compiles function(*args), args trees of ShapeDtypeStructs, for one chip; in a Worker only."""
  dump = pathlib.Path(os.environ.get("JAX_TRITON_DUMP_DIR") or _tpu_dump())
  shutil.rmtree(dump)
  dump.mkdir()
  sharding = _sharding(target)
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  begun, cpu_begun = time.perf_counter(), sum(os.times()[:4])
  traced = jax.jit(function, donate_argnums=donate).trace(*jax.tree.map(place, args))
  compiled = traced.lower(lowering_platforms=(TARGETS[target].platform,)).compile()
  seconds, cpu_seconds = time.perf_counter() - begun, sum(os.times()[:4]) - cpu_begun
  files = tuple(p for p in dump.rglob("*") if p.is_file())
  grids = dict(_grids(traced.jaxpr))
  return Compiled(target, compiled.as_text(), grids, files, seconds, cpu_seconds)


def _tpu_dump():
  return re.search(r"--xla_jf_dump_to=(\S+)", os.environ["LIBTPU_INIT_ARGS"])[1]


def _grids(jaxpr):
  for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if eqn.primitive.name == "pallas_call":
      yield eqn.params["name"], eqn.params["grid_mapping"].grid
    else:
      for inner in jaxprs_in_params(eqn.params):
        yield from _grids(inner)


def tpu_resources(compiled: Compiled, kernel: str) -> dict:
  """VLIW bundles of one grid step, its matrix instructions by the dtype of their operands, VMEM.

  Bundles are a lower bound on cycles. A loop inside the kernel would count once: `loops` says there
  is one. VMEM holds windows (twice, to load ahead), scratch and what registers spill.
  """

  def read(stage):
    pattern = rf"{kernel}.*\d-{stage}\.txt$"
    (path,) = [p for p in compiled.files if re.search(pattern, p.name)]
    return path.read_text()

  text = read("final_bundles")
  # "0x1f LB: >> { ... }": one angle bracket per loop around the bundle, the grid's the first.
  depths = [
    m[1].count(">") for m in re.finditer(r"^ *(?:0x)?[0-9a-f]+ +(?:\w\w)? *:([ >]*)\{", text, re.M)
  ]
  # "#allocation5 [shape = '...', space=vmem, size = 0x80000, scoped, tag = 'input window ...']"
  allocations = re.findall(
    r"^ *#allocation\w+ \[.*space=vmem, size = (0x[0-9a-f]+).*?tag = '(.*)'", read("post-ra"), re.M
  )
  return dict(
    bundles=sum(depth > 0 for depth in depths),
    loops=max(depths) > 1,
    vmem_bytes=sum(int(size, 16) for size, _ in allocations),
    spill_bytes=sum(int(size, 16) for size, tag in allocations if tag.startswith("spilled")),
    products=dict(collections.Counter(re.findall(r"= vmatmul[\w.]*?\.([a-z]+\d+)\b", text))),
  )


def gpu_resources(compiled: Compiled, kernel: str) -> dict:
  """Registers, spilled and shared bytes of a kernel, and its matrix instructions by kind."""
  texts = {p: p.read_text() for p in compiled.files if p.suffix == ".ptx" and p.stat().st_size}
  (path,) = [p for p, text in texts.items() if re.search(rf"\.entry {kernel}\b", text)]
  arch = TARGETS[compiled.target].arch
  command = [ptxas(), "-v", f"-arch={arch}", str(path), "-o", os.devnull]
  said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
  number = lambda pattern, text: int(re.search(pattern, text)[1])
  shared = "".join(
    p.read_text()
    for p in compiled.files
    if p.name.endswith("thunk_sequence.txt") or p.suffix == ".compile_info"
  )
  kinds = re.findall(r"((?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*)", texts[path])
  return dict(
    registers=number(r"Used (\d+) registers", said),
    spill_bytes=number(r"(\d+) bytes spill stores", said),
    shared_bytes=number(rf"\b{kernel}\b.*shared_mem(?:ory|_bytes): ?(\d+)", shared),
    products=dict(collections.Counter(kinds)),
  )
