"""MAD, mechanistic architecture design: six small tasks (the paper's table, section 4.1).

python -m experiments.sweep --config=mad                        # the set "small", on 2 CPU cores
python -m experiments.sweep --config=mad --rows=paper --list    # full scale, and its cost
python -m experiments.sweep --config=mad --rows='paper/deltanet-conv-memorize*'
python -m experiments.sweep --config=mad --rows=why             # memorizing and convolutions

Paper: 66 settings of six tasks (a baseline, then one factor changed at a time), for each the best
of 3 learning rates x 2 weight decays, 396 runs per model of 200 epochs. The score of a task is the
mean over its settings of the macro accuracy (averaged over classes of tokens). PAPER has the table.

Why: the task memorize alone, by width of the convolution and number of examples, with the same
number of updates. A convolution of width 2 mixes the key before an insert token into that token;
one of width 4 also mixes in the key before that one.

Small: one setting per task, sequences of 16-64 tokens, width 64; half a minute per run on one core,
2-3 minutes where recall is not learned. In-context recall has the benchmark's vocabulary and number
of examples: with a vocabulary of 64, few keys repeat in 32 tokens; 3,200 examples are memorized.
"""

import dataclasses
import functools

from deltanet_jax.config import MixerConfig, ModelConfig
from deltanet_jax.data import mad
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gla import GLAConfig
from deltanet_jax.mixers.hyena import HyenaConfig, MultiheadHyenaConfig
from deltanet_jax.mixers.linear_attention import LinearAttentionConfig
from deltanet_jax.mixers.mamba import MambaConfig
from experiments.lib import synthetic_models
from experiments.lib.sweep_spec import Point, Row
from experiments.lib.synthetic_models import with_and_without_conv
from experiments.lib.training_run import TrainingRun

TASKS = (
  "compress",
  "fuzzy_recall",
  "context_recall",
  "memorize",
  "noisy_recall",
  "selective_copy",
)
# Accuracy in percent, in the order of TASKS. DeltaNet, Mamba and both Hyenas had convolutions, GLA
# had none.
PAPER = {
  "attention": (51.6, 29.8, 94.1, 85.2, 86.8, 99.6),
  "hyena": (45.2, 7.9, 81.7, 89.5, 78.8, 93.1),
  "multihead-hyena": (44.8, 14.4, 99.0, 89.4, 98.6, 93.0),
  "mamba-conv": (52.7, 6.7, 90.4, 89.5, 90.1, 86.3),
  "gla": (38.8, 6.9, 80.8, 63.3, 81.6, 88.6),
  "deltanet-conv": (42.2, 35.7, 100.0, 52.8, 100.0, 100.0),
}


def mixers(width: int, length: int) -> dict[str, MixerConfig]:
  """Every model by name; the state has 16 values per channel where it can be chosen."""
  heads = width // 16
  return {
    "attention": AttentionConfig(head_size=8),
    "hyena": HyenaConfig(length=length),
    "multihead-hyena": MultiheadHyenaConfig(length=length, head_size=8),
    **with_and_without_conv("mamba", MambaConfig, state_size=4),
    **with_and_without_conv("gla", GLAConfig, heads=heads, expand_k=1.0),
    **with_and_without_conv("deltanet", DeltaNetConfig, heads=heads, key_size=16, value_size=16),
    **with_and_without_conv("linear-attention", LinearAttentionConfig, heads=width // 8),
  }


def model(
  name: str,
  task: str,
  *,
  length: int,
  width: int,
  mixer: MixerConfig | None = None,
  **settings,
) -> ModelConfig:
  """The model of the benchmark: two layers with SwiGLU, an output bias.

  For the task `compress` it is an autoencoder with a decoder of two layers.

  Args:
    mixer: the mixer of that name by default.
  """
  defaults = dict(
    width=width,
    depth=2,
    mlp_multiple=16,
    head_bias=True,
    autoencoder=2 if task == "compress" else 0,
    scan=False,
  )
  mixer = mixer or mixers(width, length)[name]
  return synthetic_models.model(name, mixer, **defaults | settings)


def _scored(task: str, setting: dict) -> int | None:
  """Targets per sequence that have a loss in training; None if all have."""
  per_sequence = dict(selective_copy=setting.get("copied"), memorize=setting["length"] // 2)
  return per_sequence.get(task)


def _run(
  name: str,
  task: str,
  setting: dict,
  *,
  width: int,
  batch: int,
  epochs: int,
  point: Point,
  seed: int,
  every: int = 1,
  **settings,
) -> TrainingRun:
  """Args:
  setting: arguments of the task.
  every: epochs between evaluations.
  settings: more fields of ModelConfig.
  """
  data = mad.make(task, **setting, batch=batch, seed=12345 + seed)
  built = model(name, task, vocab=setting["vocab"], length=data.shape[1], width=width, **settings)
  rate = point["learning_rate"]
  optimizer = synthetic_models.adamw(
    rate,
    final_learning_rate=rate,  # constant
    warmup_tokens=0,
    weight_decay=point["weight_decay"],
  )
  cfg = synthetic_models.train_config(
    built,
    data,
    optimizer,
    updates=epochs * data.epoch,
    eval_every=every * data.epoch,
    checkpoint_every=10 * every * data.epoch,
    log_every=every * data.epoch,
    seed=seed,
    scored=_scored(task, setting),
    stop_metric="validation_macro_accuracy",
    stop_above=0.999,
  )
  return TrainingRun(cfg, data, synthetic_models.accuracy(data))


def _make_paper(name: str, task: str, setting: dict, point: Point, seed: int) -> TrainingRun:
  sizes = dict(width=128, batch=128, epochs=200, dtype="bfloat16")
  return _run(name, task, setting, **sizes, point=point, seed=seed)


def _make_why(name: str, conv: int, examples: int, point: Point, seed: int) -> TrainingRun:
  setting = SMALL["memorize"]
  epochs = setting["epochs"] * setting["examples"] // examples
  setting = setting | dict(examples=examples, epochs=epochs)
  mixer = dataclasses.replace(mixers(64, setting["length"])[name], conv=conv)
  return _make_small(name, "memorize", setting, point, seed, mixer=mixer)


def _make_small(
  name: str,
  task: str,
  setting: dict,
  point: Point,
  seed: int,
  mixer: MixerConfig | None = None,
) -> TrainingRun:
  batch, epochs = setting["batch"], setting["epochs"]
  setting = {name: x for name, x in setting.items() if name not in ("batch", "epochs")}
  splits = dict(validation_examples=640, test_examples=640)
  sizes = dict(width=64, batch=batch, epochs=epochs, every=max(epochs // 10, 1), init_std=0.125)
  return _run(name, task, setting | splits, **sizes, point=point, seed=seed, mixer=mixer)


_MODELS = tuple(mixers(64, 64))
# Arguments of `mad.make`, batch size and epochs.
SMALL = {
  "memorize": dict(vocab=512, length=32, examples=256, batch=64, epochs=100),
  "fuzzy_recall": dict(vocab=16, length=32, examples=3200, batch=32, epochs=5),
  "context_recall": dict(vocab=16, length=64, examples=12800, batch=32, epochs=5),
  "noisy_recall": dict(
    vocab=32, length=64, examples=12800, noise_vocab=16, noise=0.2, batch=32, epochs=5
  ),
  "selective_copy": dict(vocab=16, length=64, examples=3200, copied=8, batch=32, epochs=5),
  "compress": dict(vocab=16, length=16, examples=3200, batch=32, epochs=10),
}


def _seeds(name: str, task: str) -> tuple[int, ...]:
  """Five seeds for the paper's two claims from this table: memorizing and in-context recall."""
  recalls = name.startswith(("attention", "deltanet", "gla"))
  claimed = task == "memorize" or (task in ("fuzzy_recall", "context_recall") and recalls)
  return tuple(range(5)) if claimed else (0,)


def _grid(rates, decays) -> tuple[Point, ...]:
  return tuple(dict(learning_rate=x, weight_decay=y) for x in rates for y in decays)


ROWS = [
  Row(
    set="paper",
    key=dict(model=name, task=task, **setting),
    make=functools.partial(_make_paper, name, task, setting),
    grid=_grid((1e-4, 5e-4, 1e-3), (0.0, 0.1)),
    metric="validation_macro_accuracy",
    evaluation="best",
  )
  for name in _MODELS
  for task in TASKS
  for setting in mad.SETTINGS[task]
] + [
  Row(
    set="small",
    key=dict(model=name, task=task),
    make=functools.partial(_make_small, name, task, SMALL[task]),
    # For in-context recall the lower rate was at least as good for every model.
    grid=_grid((1e-3,) if task == "noisy_recall" else (1e-3, 3e-3), (0.0,)),
    seeds=_seeds(name, task),
    metric="validation_macro_accuracy",
    evaluation="best",
  )
  for task in SMALL
  for name in _MODELS
  if task == "memorize" or not name.startswith("linear")
]
ROWS += [
  Row(
    set="why",
    key=dict(model=name, task="memorize", conv=conv, examples=examples),
    make=functools.partial(_make_why, name, conv, examples),
    grid=_grid((3e-3,), (0.0,)),
    seeds=(0, 1, 2, 3, 4),
    metric="validation_macro_accuracy",
    evaluation="best",
  )
  for name in ("deltanet", "linear-attention", "gla")
  for conv, examples in ((0, 256), (2, 256), (4, 256), (4, 3200))
]
