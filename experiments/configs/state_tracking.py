"""State tracking in one layer: parity, and products of permutations of three elements (S3).

python -m experiments.state_tracking                               # trains all runs
python -m experiments.state_tracking --run=parity-deltanet-negative

A run is named by group and mixer. Heads, head size, MLP and updates are the same for all, without
convolutions and forget gates, so that only the state transition differs.
"""

from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  MixerConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  nearest,
)
from deltanet_jax.data.synthetic.state_tracking import GROUPS, product_table
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.deltaproduct import DeltaProductConfig
from deltanet_jax.mixers.linear_attention import LinearAttentionConfig

_WIDTH, _HEADS = 64, 4
_SIZE = _WIDTH // _HEADS
_DELTA = dict(heads=_HEADS, key_size=_SIZE, value_size=_SIZE, conv=0)
MIXERS: dict[str, MixerConfig] = {
  "attention": AttentionConfig(heads=_HEADS, head_size=_SIZE),
  "linear-attention": LinearAttentionConfig(heads=_HEADS),
  "deltanet": DeltaNetConfig(**_DELTA),
  "deltanet-negative": DeltaNetConfig(**_DELTA, negative_eigenvalues=True),
  "deltaproduct": DeltaProductConfig(**_DELTA, steps=2, forget_gate=False, output_gate=False),
}
# Name of a run -> group and mixer.
RUNS = {f"{group}-{mixer}": (group, mixer) for group in GROUPS for mixer in MIXERS}
UPDATES = 2500


def get_config(name: str = "parity-deltanet-negative") -> TrainConfig:
  if name not in RUNS:
    raise ValueError(f"the run is {name!r}{nearest(name, RUNS)}, expected one of {list(RUNS)}.")
  group, mixer = RUNS[name]
  length, batch, updates = 16, 64, UPDATES
  return TrainConfig(
    model=ModelConfig(
      vocab=len(product_table(GROUPS[group])),
      width=_WIDTH,
      depth=1,
      mixers={mixer: MIXERS[mixer]},
      pattern=(mixer,),
      mlp_ratio=2.0,
      mlp_multiple=32,
      init_std=0.1,
    ),
    data=DataConfig(length=length, batch=batch),
    optimizer=OptimizerConfig(
      learning_rate=3e-3,
      initial_learning_rate=1e-4,
      final_learning_rate=1e-4,
      warmup_tokens=50 * batch * length,
    ),
    checkpoint=CheckpointConfig(every=500, keep=1),
    tokens=updates * batch * length,
    loss_chunk=length,
    eval_every=updates,
  )
