"""Multi-query associative recall (the paper's figure of accuracy against width, section 4.1).

python -m experiments.sweep --config=mqar                            # the small set, 2 CPU cores
python -m experiments.sweep --config=mqar --rows=paper --list        # full scale, and its cost
python -m experiments.sweep --config=mqar --rows='paper/deltanet-64*'
python -m experiments.sweep --config=mqar --rows=long                # no convolutions, many updates

Paper: rows of 512 tokens with 64 pairs, vocabulary 8192, 100,000 examples, 64 epochs or until 99 %
are right, the best of four learning rates. A run is 50,048 updates of 128 rows, 3.3e9 tokens.
Accuracy in percent for width 64, 128, 256, 512: DeltaNet (2 heads, no convolution) 100 everywhere;
Mamba 81, 100, 100, 100; GLA 22, 95, 100, 100; RetNet 5, 87, 96, 97; RWKV-4 0, 0, 20, 35; Hyena
0, 0, 12, 20. "100" is over 99: training stops there.

Small: rows of 64 tokens, vocabulary 128, fresh examples in every update, two layers, at most 2,000
updates of 64 rows; 1 to 6 minutes of a core a run. Long: an easier task (4 pairs in 32 tokens) in
the paper's four layers, 6,000 updates, for what learns nothing without convolutions in the small
set.
"""

import functools

from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  MixerConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from deltanet_jax.data import MQAR
from deltanet_jax.eval import Accuracy
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gla import GLAConfig
from deltanet_jax.mixers.hyena import HyenaConfig, MultiheadHyenaConfig
from deltanet_jax.mixers.linear_attention import LinearAttentionConfig
from deltanet_jax.mixers.mamba import MambaConfig
from deltanet_jax.mixers.retnet import RetNetConfig
from deltanet_jax.mixers.rwkv4 import RWKV4Config
from experiments.lib.sweep_spec import Point, Row, Training

# Percent by width, as the paper's figure has them.
PAPER = {
  "deltanet": {64: 100, 128: 100, 256: 100, 512: 100},
  "mamba-conv": {64: 81, 128: 100, 256: 100, 512: 100},
  "gla": {64: 22, 128: 95, 256: 100, 512: 100},
  "retnet": {64: 5, 128: 87, 256: 96, 512: 97},
  "rwkv4": {64: 0, 128: 0, 256: 20, 512: 35},
  "hyena": {64: 0, 128: 0, 256: 12, 512: 20},
}
ENOUGH = 0.99  # accuracy at which training stops
_CONV_STD = 12**-0.5  # of a uniform number within 0.5, as convolutions begin there


def mixers(width: int, length: int, heads: int = 2) -> dict[str, MixerConfig]:
  """Every model of the table by its name; "-conv" says that keys and values are convolved."""
  delta = dict(heads=heads, key_size=width // heads, value_size=width // heads)
  retnet = dict(heads=heads, expand_v=1.0)
  return {
    "deltanet": DeltaNetConfig(**delta, conv=0),
    "deltanet-conv": DeltaNetConfig(**delta, conv=4),
    "gla": GLAConfig(heads=1, expand_k=1.0),
    "gla-conv": GLAConfig(heads=1, expand_k=1.0, conv=4),
    "retnet": RetNetConfig(**retnet),
    "retnet-conv": RetNetConfig(**retnet, conv=4),
    "linear-attention": LinearAttentionConfig(heads=heads),
    "linear-attention-conv": LinearAttentionConfig(heads=heads, conv=4),
    "mamba": MambaConfig(conv=0),
    "mamba-conv": MambaConfig(conv=4),
    "rwkv4": RWKV4Config(),
    "hyena": HyenaConfig(length=length),
    "multihead-hyena": MultiheadHyenaConfig(length=length, head_size=8),
    "attention": AttentionConfig(heads=1, head_size=width, rope_base=None, bias=True),
  }


def model(name: str, *, width: int, length: int, vocab: int, depth: int, **changes) -> ModelConfig:
  """The benchmark's shell: LayerNorms, a tied head, and in place of the MLP the norm itself."""
  attends = name == "attention"
  # Its code makes those smaller that it calls out_proj; flash-linear-attention's have another name.
  smaller = attends or name.startswith(("mamba", "hyena", "multihead"))
  shell = dict(
    vocab=vocab,
    width=width,
    depth=depth,
    mixers={name: mixers(width, length)[name]},
    pattern=(name,),
    mlp="swiglu" if name.startswith("mamba") else "identity",
    mlp_ratio=0.0,  # Mamba's blocks have nothing beside it
    norm="layer",
    norm_eps=1e-5,
    tied=True,
    positions=length if attends else 0,
    output_init="all" if smaller else "plain",
    conv_std=_CONV_STD,
    scan=False,
  )
  return ModelConfig(**shell | changes)


def _training(cfg: TrainConfig, task: MQAR) -> Training:
  return Training(cfg, task, [Accuracy(task), Accuracy(task.test, "test")])


def _config(model: ModelConfig, task: MQAR, *, updates, epoch, point: Point, seed) -> TrainConfig:
  batch, length = task.shape
  return TrainConfig(
    model=model,
    data=DataConfig(length=length, batch=batch, scored=task.pairs),
    optimizer=OptimizerConfig(
      learning_rate=point["learning_rate"],
      final_learning_rate=0.0,
      warmup_tokens=0,
      rate_every=epoch,
      weight_decay=0.1,
      decay_all=True,
      clip=None,
      b2=0.999,
    ),
    checkpoint=CheckpointConfig(every=5 * epoch, keep=1),
    tokens=updates * batch * length,
    loss_chunk=length,
    seed=seed,
    log_every=epoch,
    eval_every=epoch,
    stop_metric="validation_accuracy",
    stop_above=ENOUGH,
  )


def _make_paper(name: str, width: int, point: Point, seed: int) -> Training:
  length, vocab, batch = 512, 8192, 128
  task = MQAR(vocab, length, 64, batch=batch, seed=123 + seed, examples=100_000)
  depth = 2 if name == "attention" else 4
  sizes = dict(width=width, length=length, vocab=vocab, depth=depth)
  shell = model(name, **sizes, embedding_dropout=0.1)
  options = dict(updates=64 * task.epoch, epoch=task.epoch)
  return _training(_config(shell, task, **options, point=point, seed=seed), task)


def _make_small(name: str, width: int, pairs: int, point: Point, seed: int) -> Training:
  length, vocab, batch, epoch = 64, 128, 64, 100
  held_out = dict(validation_examples=512, test_examples=512)
  task = MQAR(vocab, length, pairs, batch=batch, seed=seed, **held_out)
  shell = model(name, width=width, length=length, vocab=vocab, depth=2, init_std=width**-0.5)
  options = dict(updates=20 * epoch, epoch=epoch)
  return _training(_config(shell, task, **options, point=point, seed=seed), task)


def _make_long(name: str, width: int, pairs: int, point: Point, seed: int) -> Training:
  length, vocab, epoch = 32, 64, 200
  held_out = dict(validation_examples=512, test_examples=512)
  task = MQAR(vocab, length, pairs, batch=64, seed=seed, **held_out)
  shell = model(name, width=width, length=length, vocab=vocab, depth=4, init_std=width**-0.5)
  options = dict(updates=30 * epoch, epoch=epoch)
  return _training(_config(shell, task, **options, point=point, seed=seed), task)


def _rates(*rates: float) -> tuple[Point, ...]:
  return tuple(dict(learning_rate=rate) for rate in rates)


_MODELS = tuple(mixers(64, 64))
_CONVOLVED = tuple(name for name in _MODELS if name.endswith("-conv"))
_OTHERS = ("attention", "hyena", "rwkv4")
_PLAIN = tuple(name.removesuffix("-conv") for name in _CONVOLVED)
# Told apart by pairs and width; the others learn nothing at 4 pairs or nothing at 16.
_LEARNING = tuple(name for name in _CONVOLVED if name != "mamba-conv")
# Width, pairs and models, the most telling first: pairs at one width, widths at the most pairs.
_SMALL = [
  (32, 16, _CONVOLVED + _OTHERS),
  (32, 4, _PLAIN),
  (32, 4, _CONVOLVED + _OTHERS),
  (64, 16, _CONVOLVED + _OTHERS),
  (32, 8, _LEARNING),
  (16, 16, _LEARNING),
  (32, 16, _PLAIN),
]


def _seeds(name: str, width: int, pairs: int) -> tuple[int, ...]:
  """Five where models are told apart."""
  return tuple(range(5)) if (width, pairs) == (32, 16) and name in _LEARNING else (0,)


def _grid(name: str, width: int, pairs: int) -> tuple[Point, ...]:
  """One rate for what learned nothing from fewer pairs or with less width, at any of three."""
  hopeless = name == "mamba-conv" if width == 64 else name in _PLAIN and pairs == 16
  return _rates(5e-3) if hopeless else _rates(2e-3, 5e-3, 1e-2)


ROWS = [
  Row(
    set="paper",
    key=dict(model=name, width=width, pairs=64),
    make=functools.partial(_make_paper, name, width),
    grid=_rates(1e-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 1e-2),
    metric="validation_accuracy",
    enough=ENOUGH,
  )
  for name in _MODELS
  for width in (64, 128, 256, 512)
] + [
  Row(
    set="small",
    key=dict(model=name, width=width, pairs=pairs),
    make=functools.partial(_make_small, name, width, pairs),
    grid=_grid(name, width, pairs),
    seeds=_seeds(name, width, pairs),
    metric="validation_accuracy",
    enough=ENOUGH,
  )
  for width, pairs, names in _SMALL
  for name in names
]
ROWS += [
  Row(
    set="long",
    key=dict(model=name, width=64, pairs=4),
    make=functools.partial(_make_long, name, 64, 4),
    grid=_rates(1e-3, 3e-3),
    metric="validation_accuracy",
    enough=ENOUGH,
  )
  for name in ("deltanet", "linear-attention", "attention")
]
