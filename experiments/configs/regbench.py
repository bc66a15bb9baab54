"""RegBench: in-context learning of regular languages (the paper's figure, appendix A.2).

python -m experiments.sweep --config=regbench                       # set "small", on 2 CPU cores
python -m experiments.sweep --config=regbench --rows=paper --list   # full scale, and its cost
python -m experiments.sweep --config=regbench --rows='paper/deltanet-conv-20000'

Paper: 2,500-20,000 training sequences, each of its own automaton (DFA), 200 epochs, models of width
256, 512 or 1024 and 4, 8 or 12 layers; the one with the lowest validation loss is reported.
Accuracy is the fraction of predicted letters that the automaton accepts; PAPER has the values of
the figure.

Small: automata of 4-6 states and 8 letters, sequences of 128 tokens, width 64, two layers, about
630 updates with batch size 32 for any number of sequences; 1-2 minutes per run on one core. The
baseline of both sets is an in-context n-gram model, counted on each sequence
(python -m experiments.bench.regbench_ngram).
"""

import functools
import itertools

from deltanet_jax.config import MixerConfig, ModelConfig
from deltanet_jax.data import RegBench
from deltanet_jax.eval import DfaAccuracy, Validation
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gla import GLAConfig
from deltanet_jax.mixers.linear_attention import LinearAttentionConfig
from deltanet_jax.mixers.mamba import MambaConfig
from experiments.lib import synthetic_models
from experiments.lib.sweep_spec import Point, Row
from experiments.lib.synthetic_models import learning_rates, with_and_without_conv
from experiments.lib.training_run import TrainingRun

# Accuracy in percent by number of training sequences, read from the paper's figure.
PAPER = {
  "attention": {2500: 92.66, 5000: 94.01, 10000: 94.97, 20000: 95.51},
  "deltanet-conv": {2500: 81.31, 5000: 87.32, 10000: 88.79, 20000: 93.21},
  "deltanet": {2500: 79.03, 5000: 85.18, 10000: 85.18, 20000: 92.9},
  "gla-conv": {2500: 60.32, 5000: 85.43, 10000: 89.8, 20000: 92.9},
  "gla": {2500: 52.61, 5000: 81.42, 10000: 89.79, 20000: 92.74},
  "mamba-conv": {2500: 84.27, 5000: 89.18, 10000: 90.98, 20000: 91.96},
  "mamba": {2500: 52.03, 5000: 52.52, 10000: 57.23, 20000: 57.37},
}
# Automata and sequences of the set "small": 85 tokens on average, 1 % of sequences are truncated.
SMALL = dict(
  alphabet=8, states=(4, 6), letters=(4, 8), strings=(8, 12), string_length=(1, 14), length=128
)


def mixers(width: int, heads: int, gate: bool) -> dict[str, MixerConfig]:
  """Every model by name; the keys of DeltaNet are half as wide as its values."""
  size = width // heads
  delta = dict(heads=heads, key_size=size // 2, value_size=size, output_gate=gate)
  return {
    "attention": AttentionConfig(head_size=width // 8),
    **with_and_without_conv("deltanet", DeltaNetConfig, **delta),
    **with_and_without_conv("gla", GLAConfig, heads=heads),
    **with_and_without_conv("mamba", MambaConfig),
    **with_and_without_conv("linear-attention", LinearAttentionConfig, heads=heads),
  }


_GATED = ("deltanet", "deltanet-conv")


def model(name: str, *, width: int, heads: int = 4, gate: bool = False, **settings) -> ModelConfig:
  """The model of the benchmark: LayerNorm, GELU MLP with biases, tied embeddings.

  Mamba blocks have no MLP.
  """
  return synthetic_models.model(
    name,
    mixers(width, heads, gate)[name],
    width=width,
    mlp="gelu",
    mlp_ratio=0.0 if name.startswith("mamba") else 4.0,
    norm="layer",
    tied=True,
    output_init="mlp",
    **settings,
  )


def _run(
  model: ModelConfig, task: RegBench, *, epochs: int, every: int, rate: float, seed: int
) -> TrainingRun:
  """Args:
  every: epochs between evaluations.
  """
  batch, length = task.shape
  updates = epochs * task.epoch
  optimizer = synthetic_models.adamw(
    rate,
    initial_learning_rate=1e-6,
    final_learning_rate=0.1 * rate,
    warmup_tokens=updates * batch * length // 10,
  )
  cfg = synthetic_models.train_config(
    model,
    task,
    optimizer,
    updates=updates,
    eval_every=every * task.epoch,
    checkpoint_every=5 * every * task.epoch,
    log_every=task.epoch,
    seed=seed,
  )
  return TrainingRun(cfg, task, [Validation(task), DfaAccuracy(task.test, "test")])


def _make_paper(name: str, examples: int, point: Point, seed: int) -> TrainingRun:
  task = RegBench(batch=32, examples=examples, seed=seed)
  sizes = dict(width=int(point["width"]), depth=int(point["depth"]))
  gate = bool(point.get("gate", 0))
  built = model(name, vocab=task.vocab, **sizes, gate=gate, embedding_dropout=0.1)
  return _run(built, task, epochs=200, every=1, rate=2.5e-4, seed=seed)


def _make_small(name: str, examples: int, point: Point, seed: int) -> TrainingRun:
  splits = dict(validation_examples=256, test_examples=512)
  task = RegBench(batch=32, examples=examples, seed=seed, shuffle=True, **SMALL, **splits)
  epochs = 20_000 // examples  # the same number of updates for any number of examples
  built = model(name, vocab=task.vocab, width=64, depth=2, heads=2, init_std=0.125, scan=False)
  every = max(epochs // 10, 1)
  return _run(built, task, epochs=epochs, every=every, rate=point["learning_rate"], seed=seed)


def _paper_grid(name: str) -> tuple[Point, ...]:
  gates = (0, 1) if name in _GATED else (0,)
  grid = itertools.product((256, 512, 1024), (4, 8, 12), gates)
  return tuple(dict(width=width, depth=depth, gate=gate) for width, depth, gate in grid)


_MODELS = tuple(mixers(64, 2, False))
_SLOW = ("mamba", "mamba-conv")  # take 3x as long as the others
_FAST = tuple(name for name in _MODELS if name not in _SLOW and not name.startswith("linear"))


def _small_grid(name: str, examples: int) -> tuple[Point, ...]:
  """Two learning rates at the most examples; the higher one is better there, and used elsewhere."""
  both = examples == 2000 and name not in _SLOW
  return learning_rates(2e-3, 5e-3) if both else learning_rates(5e-3)


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
