"""Target chips and machines for AOT compilation, without the hardware."""

import dataclasses
import functools
import glob
import importlib.util
import math
import re
import sysconfig

from jax.experimental import topologies

from deltanet_jax.chips import CHIPS, Chip

# Chip -> smallest topology that the TPU compiler accepts; one device for a GPU.
TARGETS = {
  "v5e": "v5e:2x2",
  "v6e": "v6e:2x2",
  "v5p": "v5p:2x2x1",
  "h100": "1x1x1",
  "a100": "1x1x1",
  "b200": "1x1x1",
}
_GPUS_PER_HOST = 8

_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes_per_core}
  shared_memory_per_block_optin: {chip.on_chip}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.bandwidth:.0f}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {chip.memory}
  cuda_compute_capability {{ major: {gpu.major} minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 patch: 0 }}
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.device_name}"
"""


@dataclasses.dataclass(frozen=True)
class Machine:
  """Devices of one kind: a single chip ("h100", "v5e") or a topology ("h100x8", "v5p:4x4x4")."""

  name: str
  chip_name: str
  topology: str  # in the compiler's notation
  size: int  # number of devices used

  @property
  def chip(self) -> Chip:
    return CHIPS[self.chip_name]

  @property
  def platform(self) -> str:
    return self.chip.platform

  @property
  def lowering(self) -> str:
    """The platform in the notation of `lowering_platforms`."""
    return "cuda" if self.platform == "gpu" else "tpu"


@functools.cache
def devices(machine: Machine) -> list:
  """JAX device descriptions of a machine, without the hardware."""
  options = dict(topology_name=machine.topology)
  if gpu := machine.chip.nvidia:
    config = _GPU_CONFIG.format(chip=machine.chip, gpu=gpu)
    options = dict(topology=machine.topology, target_config=config)
  described = topologies.get_topology_desc(platform=machine.lowering, **options)
  return described.devices[: machine.size]


def one(chip: str) -> Machine:
  """A machine of one chip of TARGETS."""
  return Machine(chip, chip, TARGETS[chip], 1)


def machine(name: str) -> Machine:
  """Parse a machine name like "h100x8" or "v5e:16x16".

  Raises:
    ValueError: unknown chip or unsupported number of devices.
  """
  gpu, tpu = re.fullmatch(r"(\w+?)x(\d+)", name), re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
  chip, shape = (gpu or tpu).groups() if gpu or tpu else (None, None)
  if chip not in TARGETS or CHIPS[chip].platform != ("gpu" if gpu else "tpu"):
    of = lambda platform: [x for x in TARGETS if CHIPS[x].platform == platform]
    raise ValueError(
      f"target is {name!r}, expected a GPU of {of('gpu')} with a number of devices, as in h100x8,"
      f" or a TPU of {of('tpu')} with a topology, as in v5e:16x16."
    )
  size = math.prod(map(int, shape.split("x")))
  if tpu:
    return Machine(name, chip, name, size)
  hosts, rest = divmod(size, _GPUS_PER_HOST)
  if size < 1 or (hosts and rest):
    raise ValueError(
      f"target is {name!r}, expected 1 to {_GPUS_PER_HOST} GPUs or a multiple of them."
    )
  return Machine(name, chip, f"1x{hosts}x{_GPUS_PER_HOST}" if hosts else f"1x1x{rest}", size)


def ptxas() -> str | None:
  """Path of the PTX assembler in the nvidia-cuda-nvcc-cu12 wheel; None if not installed."""
  found = glob.glob(f"{sysconfig.get_path('purelib')}/nvidia/cuda_nvcc/bin/ptxas")
  return found[0] if found else None


def nvdisasm() -> str:
  """Path of the SASS disassembler in the triton wheel."""
  return f"{sysconfig.get_path('purelib')}/triton/backends/nvidia/bin/nvdisasm"


def check_installed(platforms: list[str]):
  """Raise ValueError if a wheel needed to compile for these platforms is not installed."""
  has = lambda module: importlib.util.find_spec(module) is not None
  needs = {}
  if "tpu" in platforms:
    needs |= {"libtpu": has("libtpu")}
  if "gpu" in platforms:
    needs |= {
      "jax-cuda12-plugin": has("jax_cuda12_plugin"),
      "jax-cuda12-pjrt": has("jax_plugins") and has("jax_plugins.xla_cuda12"),
      "nvidia-cuda-nvcc-cu12": ptxas() is not None,
      "jax-triton": has("jax_triton"),
      "triton": has("triton"),
    }
  if absent := [wheel for wheel, installed in needs.items() if not installed]:
    raise ValueError(
      f"compiling for {' and '.join(dict.fromkeys(platforms))} needs {', '.join(absent)}:"
      " pip install -e .[aot]"
    )
