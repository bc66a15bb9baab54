"""Smoke test of every model family: a tiny byte-level model on the bundled novels.

python -m experiments.train --config=tiny:gated-deltanet --workdir=DIR

The name is a preset of `python -m experiments.models` without its size. Chunks are short and heads
few, so neither speed nor loss tells which family is better.
"""

from deltanet_jax.config import CheckpointConfig, DataConfig, OptimizerConfig, TrainConfig, nearest
from deltanet_jax.models import preset
from deltanet_jax.models.presets import FAMILIES


def get_config(family: str = "deltanet") -> TrainConfig:
  if family not in FAMILIES:
    raise ValueError(
      f"the family is {family!r}{nearest(family, FAMILIES)}, expected one of {list(FAMILIES)}."
    )
  return TrainConfig(
    model=preset(f"{family}-tiny", vocab=258, tied=True),
    data=DataConfig(length=128, batch=8),
    optimizer=OptimizerConfig(
      learning_rate=5e-3,
      initial_learning_rate=3e-4,
      final_learning_rate=3e-4,
      warmup_tokens=20_000,
    ),
    checkpoint=CheckpointConfig(every=100),
    tokens=200_000,
    loss_chunk=128,
    eval_every=100,
    eval_batches=20,
  )
