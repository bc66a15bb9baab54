"""Mechanistic architecture design, six small tasks (the paper's table, section 4.1).

python -m experiments.sweep --config=mad                             # the small set, 2 CPU cores
python -m experiments.sweep --config=mad --rows=paper --list         # full scale, and its cost
python -m experiments.sweep --config=mad --rows='paper/deltanet-conv-memorize*'
python -m experiments.sweep --config=mad --rows=why      # memorising and convolutions

Paper: 66 settings of six tasks (a baseline, then one factor changed at a time), for each the best
of 3 learning rates x 2 weight decays, 396 runs a model of 200 epochs. A task's score is the mean
over its settings, of accuracy averaged over kinds of tokens. The paper's table is PAPER below.

Why: memorising alone, by width of the convolution and number of examples, as many updates for all.
Two tokens wide it shows an insert token the key before it, four tokens wide also the key before.

Small: one setting a task, rows of 16 to 64 tokens, width 64; half a minute of a core a run, two or
three where recall is not learned. Recall from the context has the benchmark's own vocabulary and
number of rows: with 64 tokens in rows of 32 few keys come back; 3,200 rows are learned by heart.
"""

import dataclasses
import functools

from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  MixerConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from deltanet_jax.data import SyntheticTask, mad
from deltanet_jax.eval import Accuracy
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gla import GLAConfig
from deltanet_jax.mixers.hyena import HyenaConfig, MultiheadHyenaConfig
from deltanet_jax.mixers.linear_attention import LinearAttentionConfig
from deltanet_jax.mixers.mamba import MambaConfig
from experiments.lib.sweep_spec import Point, Row, Training

TASKS = (
  "compress",
  "fuzzy_recall",
  "context_recall",
  "memorize",
  "noisy_recall",
  "selective_copy",
)
# Percent, in the order of TASKS. DeltaNet, Mamba and both Hyenas had convolutions, GLA none.
PAPER = {
  "attention": (51.6, 29.8, 94.1, 85.2, 86.8, 99.6),
  "hyena": (45.2, 7.9, 81.7, 89.5, 78.8, 93.1),
  "multihead-hyena": (44.8, 14.4, 99.0, 89.4, 98.6, 93.0),
  "mamba-conv": (52.7, 6.7, 90.4, 89.5, 90.1, 86.3),
  "gla": (38.8, 6.9, 80.8, 63.3, 81.6, 88.6),
  "deltanet-conv": (42.2, 35.7, 100.0, 52.8, 100.0, 100.0),
}
_CONV_STD = 12**-0.5  # of a uniform number within 0.5, as convolutions begin there


def mixers(width: int, length: int) -> dict[str, MixerConfig]:
  """Every model by its name: states of 16 numbers a channel where there is a choice."""
  heads = width // 16
  delta = dict(heads=heads, key_size=16, value_size=16)
  return {
    "attention": AttentionConfig(head_size=8),
    "hyena": HyenaConfig(length=length),
    "multihead-hyena": MultiheadHyenaConfig(length=length, head_size=8),
    "mamba": MambaConfig(state_size=4, conv=0),
    "mamba-conv": MambaConfig(state_size=4, conv=4),
    "gla": GLAConfig(heads=heads, expand_k=1.0),
    "gla-conv": GLAConfig(heads=heads, expand_k=1.0, conv=4),
    "deltanet": DeltaNetConfig(**delta, conv=0),
    "deltanet-conv": DeltaNetConfig(**delta, conv=4),
    "linear-attention": LinearAttentionConfig(heads=width // 8),
    "linear-attention-conv": LinearAttentionConfig(heads=width // 8, conv=4),
  }


def model(name: str, task: str, *, vocab, length, width, **changes) -> ModelConfig:
  """The benchmark's shell: two layers with SwiGLU, a head with a bias; to compress, a decoder."""
  shell = dict(
    vocab=vocab,
    width=width,
    depth=2,
    mixers={name: mixers(width, length)[name]},
    pattern=(name,),
    mlp_multiple=16,
    norm_eps=1e-5,
    head_bias=True,
    autoencoder=2 if task == "compress" else 0,
    conv_std=_CONV_STD,
    scan=False,
  )
  return ModelConfig(**shell | changes)


def _scored(task: str, setting: dict) -> int | None:
  """Targets of a row that count; None if it is all of them, in training."""
  per_row = dict(selective_copy=setting.get("copied"), memorize=setting["length"] // 2)
  return per_row.get(task)


def _training(name, task, setting, *, width, batch, epochs, point: Point, seed, every=1, **changes):
  data: SyntheticTask = mad.make(task, **setting, batch=batch, seed=12345 + seed)
  length = data.shape[1]
  per_update, updates = batch * length, epochs * data.epoch
  cfg = TrainConfig(
    model=model(name, task, vocab=setting["vocab"], length=length, width=width, **changes),
    data=DataConfig(length=length, batch=batch, scored=_scored(task, setting)),
    optimizer=OptimizerConfig(
      learning_rate=point["learning_rate"],
      final_learning_rate=point["learning_rate"],  # constant
      warmup_tokens=0,
      weight_decay=point["weight_decay"],
      decay_all=True,
      clip=None,
      b2=0.999,
    ),
    checkpoint=CheckpointConfig(every=10 * every * data.epoch, keep=1),
    tokens=updates * per_update,
    loss_chunk=length,
    seed=seed,
    log_every=every * data.epoch,
    eval_every=every * data.epoch,
    stop_metric="validation_macro_accuracy",
    stop_above=0.999,
  )
  return Training(cfg, data, [Accuracy(data), Accuracy(data.test, "test")])


def _make_paper(name: str, task: str, setting: dict, point: Point, seed: int) -> Training:
  sizes = dict(width=128, batch=128, epochs=200, dtype="bfloat16")
  return _training(name, task, setting, **sizes, point=point, seed=seed)


def _make_why(name: str, conv: int, examples: int, point: Point, seed: int) -> Training:
  setting = SMALL["memorize"]
  epochs = setting["epochs"] * setting["examples"] // examples
  setting = setting | dict(examples=examples, epochs=epochs)
  mixer = dataclasses.replace(mixers(64, setting["length"])[name], conv=conv)
  return _make_small(name, "memorize", setting, point, seed, mixers={name: mixer})


def _make_small(
  name: str, task: str, setting: dict, point: Point, seed: int, **changes
) -> Training:
  batch, epochs = setting["batch"], setting["epochs"]
  setting = {name: x for name, x in setting.items() if name not in ("batch", "epochs")}
  held_out = dict(validation_examples=640, test_examples=640)
  sizes = dict(width=64, batch=batch, epochs=epochs, every=max(epochs // 10, 1), init_std=0.125)
  return _training(name, task, setting | held_out, **sizes, point=point, seed=seed, **changes)


_MODELS = tuple(mixers(64, 64))
# As `mad.make` takes them, rows of a batch, and epochs.
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
  """Five for the paper's two claims of this table: memorising, and recall from the context."""
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
    # Of recall from the context the lower rate was better or as good for every model.
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
