"""Any preset with the paper's recipe for language models (appendix A.1).

python -m experiments.train --config=lm:deltanet-340m --workdir=DIR \
  --config.data.corpus=CORPUS --config.mesh.data=1 --config.mesh.fsdp=8

The name is any preset of `python -m experiments.models`; the paper trained on 8 H100. The rows of
its tables, with cost and results, are in lm_340m.py, lm_1_3b.py, lm_ablations.py and lm_3b.py.
"""

from collections.abc import Iterable

from deltanet_jax.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig, nearest
from deltanet_jax.models import preset

# Size -> total tokens, tokens per update, warm-up tokens. The paper gives none for 3B.
RUNS = {
  "340m": (15_000_000_000, 2**19, 500_000_000),
  "1.3b": (100_000_000_000, 2**21, 1_000_000_000),
  "3b": (1_000_000_000_000, 2**21, 1_000_000_000),
}


def get_config(name: str = "deltanet-340m") -> TrainConfig:
  size = name.rsplit("-", 1)[-1]
  if size not in RUNS:
    raise ValueError(f"{name!r} has no such size, expected a preset that ends in {list(RUNS)}.")
  return training(name)


def training(name: str) -> TrainConfig:
  """A preset with the recipe of its size."""
  tokens, batch, warmup = RUNS[name.rsplit("-", 1)[-1]]
  length = 2048
  return TrainConfig(
    model=preset(name, dtype="bfloat16", remat="full"),
    data=DataConfig(length=length, batch=batch // length, workers=4),
    optimizer=OptimizerConfig(warmup_tokens=warmup),
    mesh=MeshConfig(data=1, fsdp=-1),
    tokens=tokens,
    grad_accum=4,
  )


def row(name: str, names: Iterable[str], size: str) -> TrainConfig:
  """A row of a table: the preset of this family and size."""
  check_row(name, names)
  return training(f"{name}-{size}")


def check_row(name: str, names: Iterable[str]):
  names = list(names)
  if name not in names:
    raise ValueError(f"the row is {name!r}{nearest(name, names)}, expected one of {names}.")
