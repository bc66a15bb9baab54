"""Language models as in the paper's main table (appendix A.1): 15 or 100 billion tokens.

python -m experiments.train --config=experiments/configs/lm.py:deltanet-340m --workdir=DIR \
  --config.data.corpus=CORPUS --config.mesh.data=1 --config.mesh.fsdp=8

The name is any preset of `python -m experiments.models`; the paper trained on 8 H100.
"""

from deltanet_jax.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from deltanet_jax.models import preset

# By size: tokens in all, tokens per update, tokens of warm-up. The paper names no 3B setting.
RUNS = {
  "340m": (15_000_000_000, 2**19, 500_000_000),
  "1.3b": (100_000_000_000, 2**21, 1_000_000_000),
  "3b": (1_000_000_000_000, 2**21, 1_000_000_000),
}


def get_config(name: str = "deltanet-340m") -> TrainConfig:
  size = name.rsplit("-", 1)[-1]
  if size not in RUNS:
    raise ValueError(f"{name!r} has no such size, expected a preset that ends in {list(RUNS)}.")
  tokens, batch, warmup = RUNS[size]
  length = 2048
  return TrainConfig(
    model=preset(name, dtype="bfloat16", remat="full"),
    data=DataConfig(length=length, batch=batch // length, workers=4),
    optimizer=OptimizerConfig(warmup_tokens=warmup),
    mesh=MeshConfig(data=1, fsdp=-1),
    tokens=tokens,
    grad_accum=4,
  )
