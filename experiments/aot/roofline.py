"""Roofline upper bound on the training throughput of the paper's 1.3B models.

A library without flags, used by the command `throughput_bound`.
"""

from deltanet_jax.config import DataConfig, MeshConfig, TrainConfig
from deltanet_jax.models import preset
from experiments.aot import targets, train_step

FAMILIES = ["transformer", "mamba", "gla", "retnet", "deltanet"]
FAMILIES += ["deltanet-sliding", "deltanet-global"]
TOKENS = 16384  # per device and update
# Device memory in bytes below which remat="none" is not tried: the smallest model needs 53 GB.
_MEMORY_WITHOUT_REMAT = 5e10


def config(name: str, length: int, devices: int, remat: str) -> TrainConfig:
  """One update of a 1.3B model with TOKENS tokens per device, weights sharded over all devices."""
  batch = devices * TOKENS // length
  return TrainConfig(
    model=preset(f"{name}-1.3b", dtype="bfloat16", remat=remat),
    data=DataConfig(length=length, batch=batch),
    mesh=MeshConfig(data=1, fsdp=devices),
    tokens=batch * length,
  )


def measure(name: str, length: int, machine: targets.Machine) -> dict:
  """Metrics with the first remat policy that fits into memory; with an error if none does."""
  enough = machine.chip.memory > _MEMORY_WITHOUT_REMAT
  for remat in ("none", "full") if enough else ("full",):
    cfg = config(name, length, machine.size, remat)
    try:
      metrics = train_step.measure(cfg, machine)
    except RuntimeError as error:  # a compiler error other than out of memory
      metrics = dict(fits=False, error=str(error).strip().split("\n")[0])
    if metrics["fits"]:
      break
  if "roofline_seconds" in metrics:
    metrics["roofline_tokens_per_second"] = TOKENS / max(metrics["roofline_seconds"].values())
  return metrics | dict(remat=remat)
