"""The demo: a small byte-level DeltaNet on two novels. Minutes on 2 CPU cores.

python -m experiments.train --config=demo --workdir=results/lm
python -m experiments.train --config=demo:transformer --workdir=results/lm-t
"""

from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig

MIXERS = {
  "deltanet": DeltaNetConfig(key_size=64, value_size=64),
  "transformer": AttentionConfig(head_size=64),
}


def get_config(mixer: str = "deltanet") -> TrainConfig:
  """Args:
  mixer: `deltanet`, or `transformer` for a Transformer++ of the same size.
  """
  if mixer not in MIXERS:
    raise ValueError(f"the demo has no model {mixer!r}, expected one of {list(MIXERS)}.")
  return TrainConfig(
    model=ModelConfig(
      vocab=258,
      width=128,
      depth=4,
      mixers={mixer: MIXERS[mixer]},
      pattern=(mixer,),
      mlp_multiple=64,
      tied=True,
      scan=False,  # 1.5x faster on a CPU at this depth
    ),
    data=DataConfig(length=256, batch=8),
    optimizer=OptimizerConfig(
      learning_rate=5e-3,
      initial_learning_rate=3e-4,
      final_learning_rate=3e-4,
      warmup_tokens=100_000,
    ),
    checkpoint=CheckpointConfig(every=130),
    tokens=800_000,
    loss_chunk=256,
    eval_every=130,
  )
