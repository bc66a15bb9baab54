"""What the configs of MQAR, MAD and RegBench share: model, optimizer and training settings."""

from typing import Any

from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  MixerConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from deltanet_jax.data import SyntheticTask
from deltanet_jax.eval import Accuracy
from deltanet_jax.train import Evaluator
from experiments.lib.sweep_spec import Point


def with_and_without_conv(
  name: str, mixer: type[MixerConfig], **settings: Any
) -> dict[str, MixerConfig]:
  """A mixer without short convolutions as `name`, and with convolutions as `name-conv`."""
  return {name: mixer(**settings, conv=0), f"{name}-conv": mixer(**settings, conv=4)}


def model(name: str, mixer: MixerConfig, **settings: Any) -> ModelConfig:
  """A model with one kind of mixer, and the settings that all three benchmarks use."""
  shared = dict(
    norm_eps=1e-5,
    # PyTorch initializes a depthwise convolution of width 4 uniformly in [-0.5, 0.5].
    conv_std=12**-0.5,
  )
  return ModelConfig(mixers={name: mixer}, pattern=(name,), **shared | settings)


def adamw(learning_rate: float, *, weight_decay: float = 0.1, **settings: Any) -> OptimizerConfig:
  """AdamW as in PyTorch: decays all parameters, b2 = 0.999, no gradient clipping."""
  torch = dict(decay_all=True, clip=None, b2=0.999)
  return OptimizerConfig(
    learning_rate=learning_rate, weight_decay=weight_decay, **torch, **settings
  )


def train_config(
  model: ModelConfig,
  task: SyntheticTask,
  optimizer: OptimizerConfig,
  *,
  updates: int,
  eval_every: int,
  checkpoint_every: int,
  log_every: int,
  seed: int,
  scored: int | None = None,
  **settings: Any,
) -> TrainConfig:
  """Train for `updates` batches of the task.

  Args:
    scored: targets per sequence that have a loss; None if all have.
    settings: more fields of TrainConfig.
  """
  batch, length = task.shape
  return TrainConfig(
    model=model,
    data=DataConfig(length=length, batch=batch, scored=scored),
    optimizer=optimizer,
    checkpoint=CheckpointConfig(every=checkpoint_every, keep=1),
    tokens=updates * batch * length,
    loss_chunk=length,
    seed=seed,
    log_every=log_every,
    eval_every=eval_every,
    **settings,
  )


def accuracy(task: SyntheticTask) -> list[Evaluator]:
  """Accuracy on the validation and the test split."""
  return [Accuracy(task), Accuracy(task.test, "test")]


def learning_rates(*rates: float) -> tuple[Point, ...]:
  """A grid of learning rates."""
  return tuple(dict(learning_rate=rate) for rate in rates)
