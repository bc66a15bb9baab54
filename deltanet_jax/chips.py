"""Accelerator specifications from the vendors' data sheets: peak FLOP/s, memory, bandwidth."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nvidia:
  """GPU properties that XLA needs for AOT compilation without a device."""

  device_name: str
  major: int  # compute capability, major.0
  arch: str  # ptxas target
  cores: int  # streaming multiprocessors
  fpus_per_core: int
  clock_ghz: float
  l2_bytes: int
  shared_bytes_per_core: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One JAX device."""

  platform: Literal["tpu", "gpu"]
  kinds: tuple[str, ...]  # substrings of `jax.Device.device_kind`
  peak_flops: float  # dense bfloat16 FLOP/s
  memory: int  # HBM bytes
  bandwidth: float  # HBM bytes per second
  # Interconnect bandwidth, bytes per second sent over all links: half of the bidirectional figure
  # that NVIDIA quotes for NVLink and Google for the inter-chip interconnect (ICI).
  links: float
  on_chip: int  # bytes of VMEM per TPU core, or of shared memory per GPU thread block
  nvidia: Nvidia | None = None


_KIB, _MIB, _GIB = 2**10, 2**20, 2**30

_A100 = Nvidia(
  device_name="NVIDIA A100-SXM4-80GB",
  major=8,
  arch="sm_80",
  cores=108,
  fpus_per_core=64,
  clock_ghz=1.41,
  l2_bytes=40 * _MIB,
  shared_bytes_per_core=164 * _KIB,
)
_H100 = Nvidia(
  device_name="NVIDIA H100 80GB HBM3",
  major=9,
  arch="sm_90a",
  cores=132,
  fpus_per_core=128,
  clock_ghz=1.98,
  l2_bytes=50 * _MIB,
  shared_bytes_per_core=228 * _KIB,
)
_H200 = dataclasses.replace(_H100, device_name="NVIDIA H200")
_B200 = dataclasses.replace(
  _H100,
  device_name="NVIDIA B200",
  major=10,
  arch="sm_100a",
  cores=148,
  clock_ghz=1.965,
  l2_bytes=132_644_864,
)

CHIPS = {
  "v4": Chip(
    platform="tpu",
    kinds=("TPU v4",),
    peak_flops=275e12,
    memory=32 * _GIB,
    bandwidth=1.23e12,
    links=3e11,
    on_chip=16 * _MIB,
  ),
  "v5e": Chip(
    platform="tpu",
    kinds=("TPU v5 lite", "TPU v5e"),
    peak_flops=197e12,
    memory=16 * _GIB,
    bandwidth=8.2e11,
    links=2e11,
    on_chip=128 * _MIB,
  ),
  "v5p": Chip(
    platform="tpu",
    kinds=("TPU v5", "TPU v5p"),
    peak_flops=459e12,
    memory=95 * _GIB,
    bandwidth=2.77e12,
    links=6e11,
    on_chip=64 * _MIB,
  ),
  "v6e": Chip(
    platform="tpu",
    kinds=("TPU v6 lite", "TPU v6e"),
    peak_flops=918e12,
    memory=32 * _GIB,
    bandwidth=1.64e12,
    links=4e11,
    on_chip=128 * _MIB,
  ),
  "a100": Chip(
    platform="gpu",
    kinds=("A100",),
    peak_flops=312e12,
    memory=85_000_000_000,
    bandwidth=2.039e12,
    links=3e11,
    on_chip=163 * _KIB,
    nvidia=_A100,
  ),
  "h100": Chip(
    platform="gpu",
    kinds=("H100",),
    peak_flops=989e12,
    memory=84_900_000_000,
    bandwidth=3.352e12,
    links=4.5e11,
    on_chip=227 * _KIB,
    nvidia=_H100,
  ),
  "h200": Chip(
    platform="gpu",
    kinds=("H200",),
    peak_flops=989e12,
    memory=141_000_000_000,
    bandwidth=4.8e12,
    links=4.5e11,
    on_chip=227 * _KIB,
    nvidia=_H200,
  ),
  "b200": Chip(
    platform="gpu",
    kinds=("B200",),
    peak_flops=2250e12,
    memory=190_000_000_000,
    bandwidth=7.7e12,
    links=9e11,
    on_chip=227 * _KIB,
    nvidia=_B200,
  ),
}


def find(device_kind: str) -> Chip | None:
  """Return the chip of a `device_kind`, or None; longest match ("TPU v5 lite" over "TPU v5")."""
  known = [(kind, chip) for chip in CHIPS.values() for kind in chip.kinds if kind in device_kind]
  return max(known, key=lambda x: len(x[0]))[1] if known else None
