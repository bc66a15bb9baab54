"""The paper's table of language models at a scale that two CPU cores can train.

make corpus                                                      # once: 25 MB of text
python -m experiments.sweep --config=language_modeling           # trains what is missing
python -m experiments.sweep --config=language_modeling --list    # sizes and cost
python -m experiments.plots                                      # table and figure

Every line of table 1 and its ablations, with Gated DeltaNet and linear attention beside them: the
same text, read as bytes, the same 1.5 million bytes in rows of 256, the same 571 thousand
parameters to a thousandth, the same learning rate. About 5 minutes of a core a run, 20 runs. The
SwiGLU of each row is as wide as the parameters leave room for; Mamba has none and twice the layers,
as in the paper. Nothing else is chosen for a row, so its figure shows what this budget gives, not
how good a mixer can be.

What is measured on held-out text: bits per byte; recall, names and values that were planted in it
(`data/corpus/planted_recall.py`); for the rows with two seeds also the loss against the
position in contexts of 1, 2, 4 and 8 times the length of training.

Paper, 340M parameters and 15 billion tokens (WikiText perplexity, SWDE): Transformer++ 28.39, 42.2;
RetNet 32.33, 13.3; Mamba 28.39, 12.4; GLA 28.65, 18.6, with convolutions 29.47, 24.0; DeltaNet
without convolutions 29.08, 24.6, with them 28.24, 26.4; with sliding windows 27.06, 39.3; with
global attention in two layers 27.51, 42.9. L1 and 1 + ELU 31.12, 14.5; L2 and 1 + ELU 28.03, 23.8;
L2 and ReLU 28.75, 27.2.
"""

import functools
import pathlib

from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  MixerConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from deltanet_jax.data import Corpus, CorpusTask, PlantedRecallText, SplitText, open_corpus
from deltanet_jax.eval import LossByPosition, PlantedRecall, Validation
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNetConfig
from deltanet_jax.mixers.gla import GLAConfig
from deltanet_jax.mixers.linear_attention import LinearAttentionConfig
from deltanet_jax.mixers.mamba import MambaConfig
from deltanet_jax.mixers.retnet import RetNetConfig
from experiments.configs import lm_340m, lm_ablations
from experiments.lib.sweep_spec import Point, Row
from experiments.lib.training_run import TrainingRun

CORPUS = "results/corpus/tokens"
PARAMETERS = 570_912  # Mamba's, the only one that has no MLP to fit them with
WIDTH, DEPTH, LENGTH, BATCH, UPDATES = 96, 4, 256, 4, 1500
MULTIPLES = (1, 2, 4, 8)  # of the length of training
# The paper's WikiText perplexity and SWDE by row.
PAPER = {
  row: (line["wikitext", "word_perplexity"], line["swde", "contains"])
  for row, line in (lm_340m.PAPER | lm_ablations.PAPER).items()
}

_DELTA = dict(key_size=32, value_size=32)
_ATTENTION = AttentionConfig(head_size=32)
# Row -> the mixers of a pattern that is repeated, and the MLP's inner width.
MODELS: dict[str, tuple[dict[str, MixerConfig], tuple[str, ...], int]] = {}


def _add(row: str, inner: int, pattern: tuple[str, ...] = (), **mixers: MixerConfig):
  MODELS[row] = mixers, pattern or tuple(mixers), inner


_add("transformer", 345, attention=_ATTENTION)
_add("retnet", 217, retnet=RetNetConfig(heads=2))
_add("mamba", 0, mamba=MambaConfig())
_add("gla", 337, gla=GLAConfig(heads=2))
_add("gla-conv", 334, gla=GLAConfig(heads=2, conv=4))
_add("deltanet-noconv", 344, deltanet=DeltaNetConfig(**_DELTA, conv=0))
_add("deltanet", 340, deltanet=DeltaNetConfig(**_DELTA))
_add(
  "deltanet-sliding",
  343,
  deltanet=DeltaNetConfig(**_DELTA),
  window=AttentionConfig(head_size=32, window=64),
)
_add(
  "deltanet-global",
  343,
  ("deltanet", "global", "global", "deltanet"),
  **{"deltanet": DeltaNetConfig(**_DELTA), "global": _ATTENTION},
)
_add("gated-deltanet", 296, gated=GatedDeltaNetConfig(key_size=16, value_size=32))
_add("linear-attention", 345, linear=LinearAttentionConfig(heads=3))
for _name in ("l1-elu", "l2-elu", "l2-relu"):
  _norm, _activation = _name.split("-")
  _add(_name, 340, deltanet=DeltaNetConfig(**_DELTA, norm=_norm, activation=_activation))
# Two seeds, and longer contexts.
MAIN = ("transformer", "retnet", "mamba", "gla", "deltanet", "gated-deltanet")


def model(row: str) -> ModelConfig:
  mixers, pattern, inner = MODELS[row]
  return ModelConfig(
    vocab=258,
    width=WIDTH,
    depth=2 * DEPTH if row == "mamba" else DEPTH,
    mixers=mixers,
    pattern=pattern,
    mlp_inner=inner,
    tied=True,
    scan=False,  # faster on a CPU at this depth
  )


@functools.cache
def _corpus(folder: str) -> Corpus:
  if not (pathlib.Path(folder) / "manifest.json").is_file():
    raise ValueError(
      f"the corpus {folder} is not there: run `make corpus` first, where there is no network"
      " `python -m experiments.fetch_corpus --shipped`."
    )
  return open_corpus(folder)


def _make(row: str, point: Point, seed: int) -> TrainingRun:
  corpus = _corpus(CORPUS)
  cfg = TrainConfig(
    model=model(row),
    data=DataConfig(corpus=CORPUS, length=LENGTH, batch=BATCH),
    optimizer=OptimizerConfig(
      learning_rate=point["learning_rate"],
      initial_learning_rate=point["learning_rate"] / 10,
      final_learning_rate=point["learning_rate"] / 10,
      warmup_tokens=UPDATES * BATCH * LENGTH // 10,
    ),
    checkpoint=CheckpointConfig(every=UPDATES // 6, keep=1),
    tokens=UPDATES * BATCH * LENGTH,
    loss_chunk=LENGTH,
    seed=seed,
    log_every=UPDATES // 20,
    eval_every=UPDATES // 2,
  )
  task = CorpusTask(corpus, length=LENGTH, batch=BATCH, seed=seed)
  return TrainingRun(cfg, task, evaluators(corpus, row))


def evaluators(corpus: Corpus, row: str) -> list:
  """Validation on the way, and the rest when the run has ended."""
  held_out = corpus.validation
  shape = dict(length=LENGTH, batch=BATCH)
  planted = functools.partial(PlantedRecallText, held_out, corpus.tokenizer(), **shape, batches=32)
  found = [
    Validation(SplitText(held_out, **shape)),
    PlantedRecall(planted(), planted(plant_answers=False)),
  ]
  if row in MAIN:
    # As many tokens in a batch of any length, so the same text in as many batches.
    sizes = {LENGTH * n: 2 * MULTIPLES[-1] // n for n in MULTIPLES}
    texts = {n: (SplitText(held_out, length=n, batch=rows), rows) for n, rows in sizes.items()}
    found.append(LossByPosition(texts, batches=10))
  first, *others = found
  return [first, *(functools.partial(_at_end, evaluator) for evaluator in others)]


def _at_end(evaluator, evaluated):
  return evaluator(evaluated) if evaluated.step == UPDATES else iter(())


ROWS = [
  Row(
    set="small",
    key=dict(model=row),
    make=functools.partial(_make, row),
    grid=(dict(learning_rate=3e-3),),
    seeds=(0, 1) if row in MAIN else (0,),
    metric="validation_bits_per_byte",
    lower=True,
  )
  for row in MODELS
]
