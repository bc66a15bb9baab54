"""A training update of the paper's 1.3B models, and the throughput that it cannot pass."""

from deltanet_jax.config import DataConfig, MeshConfig, TrainConfig
from deltanet_jax.models import preset
from experiments.aot import targets, train_step

FAMILIES = ["transformer", "mamba", "gla", "retnet", "deltanet"]
FAMILIES += ["deltanet-sliding", "deltanet-global"]
TOKENS = 16384  # of a device
# Bytes of a device below which no model is tried without remat: the smallest takes 53 GB then.
_ROOMY = 5e10


def config(name: str, length: int, devices: int, remat: str) -> TrainConfig:
  """One update of a 1.3B model with TOKENS for each device."""
  rows = devices * TOKENS // length
  return TrainConfig(
    model=preset(f"{name}-1.3b", dtype="bfloat16", remat=remat),
    data=DataConfig(length=length, batch=rows),
    mesh=MeshConfig(data=1, fsdp=devices),
    tokens=rows * length,
  )


def measure(name: str, length: int, machine: targets.Machine) -> dict:
  """Figures of the first remat that fits; if none does, those of the last, with its error."""
  for remat in ("none", "full") if machine.chip.memory > _ROOMY else ("full",):
    cfg = config(name, length, machine.size, remat)
    try:
      metrics = train_step.measure(cfg, machine)
    except RuntimeError as error:  # of a compiler, for another reason than memory
      metrics = dict(fits=False, error=str(error).strip().split("\n")[0])
    if metrics["fits"]:
      break
  if "bound_seconds" in metrics:
    metrics["bound_tokens_per_second"] = TOKENS / max(metrics["bound_seconds"].values())
  return metrics | dict(remat=remat)
