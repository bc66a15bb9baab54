"""RegBench, languages learned in context (the paper's figure, appendix A.2).

python -m experiments.sweep --config=regbench                        # the small set, 2 CPU cores
python -m experiments.sweep --config=regbench --rows=paper --list    # full scale, and its cost
python -m experiments.sweep --config=regbench --rows='paper/deltanet-conv-20000'

Paper: 2,500 to 20,000 training sequences, an automaton each, 200 epochs, models of width 256, 512
or 1024 and 4, 8 or 12 layers, the one with the lowest validation loss. Accuracy is the share of
predicted letters that the automaton accepts; PAPER below has the figure's numbers.

Small: automata of 4 to 6 states and 8 letters, rows of 128 tokens, width 64, two layers, about 630
updates of 32 rows for any number of sequences; one to two minutes of a core a run. Beside both
stand n-grams counted in the row itself (python -m experiments.bench.regbench_ngram).
"""

import functools
import itertools

from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  MixerConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from deltanet_jax.data import RegBench
from deltanet_jax.eval import DfaAccuracy, Validation
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gla import GLAConfig
from deltanet_jax.mixers.linear_attention import LinearAttentionConfig
from deltanet_jax.mixers.mamba import MambaConfig
from experiments.lib.sweep_spec import Point, Row, Training

# Percent by training sequences, as the paper's figure has them.
PAPER = {
  "attention": {2500: 92.66, 5000: 94.01, 10000: 94.97, 20000: 95.51},
  "deltanet-conv": {2500: 81.31, 5000: 87.32, 10000: 88.79, 20000: 93.21},
  "deltanet": {2500: 79.03, 5000: 85.18, 10000: 85.18, 20000: 92.9},
  "gla-conv": {2500: 60.32, 5000: 85.43, 10000: 89.8, 20000: 92.9},
  "gla": {2500: 52.61, 5000: 81.42, 10000: 89.79, 20000: 92.74},
  "mamba-conv": {2500: 84.27, 5000: 89.18, 10000: 90.98, 20000: 91.96},
  "mamba": {2500: 52.03, 5000: 52.52, 10000: 57.23, 20000: 57.37},
}
# Automata and rows of the small set: 85 tokens on average, one row in a hundred is cut.
SMALL = dict(
  alphabet=8, states=(4, 6), letters=(4, 8), strings=(8, 12), string_length=(1, 14), length=128
)
_CONV_STD = 12**-0.5  # of a uniform number within 0.5, as convolutions begin there


def mixers(width: int, heads: int, gate: bool) -> dict[str, MixerConfig]:
  """Every model by its name; DeltaNet's keys are half as wide as its values."""
  size = width // heads
  delta = dict(heads=heads, key_size=size // 2, value_size=size, output_gate=gate)
  return {
    "attention": AttentionConfig(head_size=width // 8),
    "deltanet": DeltaNetConfig(**delta, conv=0),
    "deltanet-conv": DeltaNetConfig(**delta, conv=4),
    "gla": GLAConfig(heads=heads),
    "gla-conv": GLAConfig(heads=heads, conv=4),
    "mamba": MambaConfig(conv=0),
    "mamba-conv": MambaConfig(conv=4),
    "linear-attention": LinearAttentionConfig(heads=heads),
    "linear-attention-conv": LinearAttentionConfig(heads=heads, conv=4),
  }


_GATED = ("deltanet", "deltanet-conv")


def model(name: str, *, vocab, width, depth, heads=4, gate=False, **changes) -> ModelConfig:
  """The benchmark's shell: LayerNorms, a GELU MLP with biases, a tied head; Mamba has no MLP."""
  shell = dict(
    vocab=vocab,
    width=width,
    depth=depth,
    mixers={name: mixers(width, heads, gate)[name]},
    pattern=(name,),
    mlp="gelu",
    mlp_ratio=0.0 if name.startswith("mamba") else 4.0,
    norm="layer",
    norm_eps=1e-5,
    tied=True,
    output_init="mlp",
    conv_std=_CONV_STD,
  )
  return ModelConfig(**shell | changes)


def _training(shell: ModelConfig, task: RegBench, *, epochs, every, rate, seed, chunk) -> Training:
  batch, length = task.shape
  updates, per_update = epochs * task.epoch, batch * length
  cfg = TrainConfig(
    model=shell,
    data=DataConfig(length=length, batch=batch),
    optimizer=OptimizerConfig(
      learning_rate=rate,
      initial_learning_rate=1e-6,
      final_learning_rate=0.1 * rate,
      warmup_tokens=updates * per_update // 10,
      weight_decay=0.1,
      decay_all=True,
      clip=None,
      b2=0.999,
    ),
    checkpoint=CheckpointConfig(every=5 * every * task.epoch, keep=1),
    tokens=updates * per_update,
    loss_chunk=chunk,
    seed=seed,
    log_every=task.epoch,
    eval_every=every * task.epoch,
  )
  return Training(cfg, task, [Validation(task), DfaAccuracy(task.test, "test")])


def _make_paper(name: str, examples: int, point: Point, seed: int) -> Training:
  task = RegBench(batch=32, examples=examples, seed=seed)
  sizes = dict(width=int(point["width"]), depth=int(point["depth"]))
  gate = bool(point.get("gate", 0))
  shell = model(name, vocab=task.vocab, **sizes, gate=gate, embedding_dropout=0.1)
  options = dict(epochs=200, every=1, rate=2.5e-4, chunk=task.shape[1])
  return _training(shell, task, **options, seed=seed)


def _make_small(name: str, examples: int, point: Point, seed: int) -> Training:
  held_out = dict(validation_examples=256, test_examples=512)
  task = RegBench(batch=32, examples=examples, seed=seed, shuffle=True, **SMALL, **held_out)
  # As many updates for every number of examples.
  epochs = 20_000 // examples
  shell = model(name, vocab=task.vocab, width=64, depth=2, heads=2, init_std=0.125, scan=False)
  options = dict(every=max(epochs // 10, 1), rate=point["learning_rate"], chunk=task.shape[1])
  return _training(shell, task, epochs=epochs, **options, seed=seed)


def _paper_grid(name: str) -> tuple[Point, ...]:
  gates = (0, 1) if name in _GATED else (0,)
  grid = itertools.product((256, 512, 1024), (4, 8, 12), gates)
  return tuple(dict(width=width, depth=depth, gate=gate) for width, depth, gate in grid)


_MODELS = tuple(mixers(64, 2, False))
_SLOW = ("mamba", "mamba-conv")  # three times as long as the others
_FAST = tuple(name for name in _MODELS if name not in _SLOW and not name.startswith("linear"))


def _small_grid(name: str, examples: int) -> tuple[Point, ...]:
  """Two rates with the most examples; the higher one is the better there, and all the rest have."""
  both = examples == 2000 and name not in _SLOW
  return tuple(dict(learning_rate=rate) for rate in ((2e-3, 5e-3) if both else (5e-3,)))


PAPER_SIZES, SMALL_SIZES = (2500, 5000, 10_000, 20_000), (500, 1000, 2000)

ROWS = [
  Row(
    set="paper",
    key=dict(model=name, examples=examples),
    make=functools.partial(_make_paper, name, examples),
    grid=_paper_grid(name),
    metric="validation_loss",
    lower=True,
    evaluation="best",
  )
  for name in _MODELS
  for examples in PAPER_SIZES
] + [
  Row(
    set="small",
    key=dict(model=name, examples=examples),
    make=functools.partial(_make_small, name, examples),
    grid=_small_grid(name, examples),
    seeds=(0, 1, 2, 3, 4) if examples == 2000 and name not in _SLOW else (0,),
    metric="validation_loss",
    lower=True,
    evaluation="best",
  )
  for names in (_FAST, _SLOW)
  for examples in SMALL_SIZES[::-1]
  for name in names
]
