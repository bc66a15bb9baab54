"""The paper's language-model table at a scale that 2 CPU cores can train.

make corpus                                                      # once: 25 MB of text
python -m experiments.sweep --config=language_modeling           # trains missing runs
python -m experiments.sweep --config=language_modeling --list    # sizes and cost
python -m experiments.plots                                      # table and figure

Every row of table 1 and its ablations, and also Gated DeltaNet and linear attention: the same text,
tokenized as bytes, 1.5 million bytes in sequences of 256, 571 thousand parameters (equal to 0.1 %)
and the same learning rate. 20 runs of about 5 minutes on one core. The width of each SwiGLU is set
so that the number of parameters matches; Mamba has none and twice the layers, as in the paper. No
hyperparameter is tuned per row, so results show what this budget gives, not how good a mixer can
be.

Evaluated on the validation split: bits per byte; recall of names and values planted in the text
(`data/corpus/planted_recall.py`); for rows with two seeds also the loss by position in contexts of
1, 2, 4 and 8 times the training length.

Paper, 340M parameters and 15 billion tokens (WikiText perplexity, SWDE): Transformer++ 28.39, 42.2;
RetNet 32.33, 13.3; Mamba 28.39, 12.4; GLA 28.65, 18.6, with convolutions 29.47, 24.0; DeltaNet
without convolutions 29.08, 24.6, with them 28.24, 26.4; with sliding windows 27.06, 39.3; with
global attention in two layers 27.51, 42.9. L1 and 1 + ELU 31.12, 14.5; L2 and 1 + ELU 28.03, 23.8;
L2 and ReLU 28.75, 27.2.
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
from deltanet_jax.data import Corpus, CorpusTask, PlantedRecallText, SplitText, open_corpus
from deltanet_jax.eval import LossByPosition, PlantedRecall, Validation
from deltanet_jax.files import as_path
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
PARAMETERS = 570_912  # of Mamba, which has no MLP whose width could be adapted
WIDTH, DEPTH, LENGTH, BATCH, UPDATES = 96, 4, 256, 4, 1500
MULTIPLES = (1, 2, 4, 8)  # of the training length
# WikiText perplexity and SWDE of the paper, by row.
PAPER = {
  row: (values["wikitext", "word_perplexity"], values["swde", "contains"])
  for row, values in (lm_340m.PAPER | lm_ablations.PAPER).items()
}

_DELTA = dict(key_size=32, value_size=32)
_ATTENTION = AttentionConfig(head_size=32)
# Row -> mixers, the pattern of layers (repeated), and the inner width of the MLP.
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
# Rows with two seeds, and evaluated in longer contexts.
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
  if not (as_path(folder) / "manifest.json").is_file():
    raise ValueError(
      f"there is no corpus in {folder}: run `make corpus` first, or without network"
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
  """Validation during training, the other evaluators only at its end."""
  validation = corpus.validation
  shape = dict(length=LENGTH, batch=BATCH)
  planted = functools.partial(
    PlantedRecallText, validation, corpus.tokenizer(), **shape, batches=32
  )
  found = [
    Validation(SplitText(validation, **shape)),
    PlantedRecall(planted(), planted(plant_answers=False)),
  ]
  if row in MAIN:
    # Batches of all lengths have the same number of tokens, so 10 batches are the same text.
    sizes = {LENGTH * n: 2 * MULTIPLES[-1] // n for n in MULTIPLES}
    texts = {n: (SplitText(validation, length=n, batch=x), x) for n, x in sizes.items()}
    found.append(LossByPosition(texts, batches=10))
  first, *others = found
  return [first, *(functools.partial(_at_end, evaluator) for evaluator in others)]


def _at_end(evaluator, context):
  return evaluator(context) if context.step == UPDATES else iter(())


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
