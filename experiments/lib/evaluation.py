"""A model and a text to evaluate it on: found, and checked to belong together."""

import contextlib
import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from tqdm import tqdm

from deltanet_jax import sharding
from deltanet_jax.config import DataConfig, MeshConfig, TrainConfig
from deltanet_jax.data import (
  TOKENIZERS,
  Corpus,
  Split,
  SplitText,
  Tokenizer,
  find_tokenizer,
  load_tokenizer,
  open_corpus,
  shipped_corpus,
  vocabulary_mismatch,
)
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.eval import LossByPosition, Validation, evaluate
from deltanet_jax.interop import load_fla
from deltanet_jax.models import LM
from deltanet_jax.models.abstract import digest, weights_of
from deltanet_jax.train import load_trained
from deltanet_jax.train import workdir as folders

SHIPPED = "shipped"
SPLITS = ("validation", "train")


@dataclasses.dataclass(frozen=True)
class Subject:
  """A model that is evaluated."""

  model: LM
  config: TrainConfig  # its run's, or as of one: how batches are computed
  folder: pathlib.Path
  tokenizer: str | pathlib.Path | None  # as `load_tokenizer(tokenizer, folder)` takes it
  step: int | None
  history: dict  # of its run: the weights it began with, how it was extended
  identity: dict | None  # of its run's task

  def facts(self) -> dict:
    """Which model it is, for the key of a result."""
    sha256 = digest(jax.device_get(weights_of(self.model)))
    return dict(model=self.folder.resolve().name, step=self.step, weights=sha256[:12])

  def remarks(self) -> dict:
    """What else is to be said of its training; of paths the last name."""
    begun, extended = self.history.get("initial"), self.history.get("extended")
    told = {}
    if begun:
      told |= dict(initial=begun | dict(path=pathlib.Path(begun["path"]).name))
    if extended:
      told |= dict(extended=[{x: one[x] for x in ("step", "from", "to")} for one in extended])
    return told


def open_run(folder: str, step: int | None, tokenizer: str | None) -> Subject:
  """The model of a run, or of exported weights; it knows its tokenizer."""
  trained = load_trained(folder, step)
  if trained.tokenizer is None:
    raise ValueError(f"{folder} was not trained on text: it can be evaluated by its own task only.")
  if tokenizer is not None:
    raise ValueError(f"{folder} was trained on {trained.tokenizer!r}: leave --tokenizer out.")
  identity = folders.read_config(trained.folder)[1].get("identity")
  return Subject(
    trained.model,
    trained.config,
    trained.folder,
    trained.tokenizer,
    trained.step,
    trained.history,
    identity,
  )


def open_public(folder: str, tokenizer: str | None) -> Subject:
  """The model of a public checkpoint, and a tokenizer if one is named or lies beside it."""
  model = load_fla(folder)
  tokenizer = tokenizer or find_tokenizer(folder)
  if tokenizer not in (None, *TOKENIZERS):
    tokenizer = pathlib.Path(tokenizer).resolve()
  cfg = TrainConfig(model=model.cfg, data=DataConfig(length=2048, batch=8))
  return Subject(model, cfg, pathlib.Path(folder), tokenizer, None, {}, None)


def tokenizer_of(subject: Subject) -> Tokenizer:
  """What makes the model's tokens, if its ids fit."""
  if subject.tokenizer is None:
    raise ValueError("nothing says how this model's tokens are made: set --tokenizer.")
  tokenizer = load_tokenizer(subject.tokenizer, subject.folder)
  if odd := vocabulary_mismatch(tokenizer.vocab, subject.model.cfg.vocab):
    raise ValueError(f"{odd}: {subject.tokenizer} is not what made its tokens.")
  return tokenizer


def check_tokens(subject: Subject, corpus: Corpus):
  """Refuses a corpus of other tokens than the model's."""
  recipe, folder = corpus.manifest.recipe, corpus.train.folder
  if subject.tokenizer is None:
    if odd := vocabulary_mismatch(recipe.vocab, subject.model.cfg.vocab):
      raise ValueError(f"{folder}: {odd}; prepare the text with the tokenizer of the model.")
    return
  # By name where it is enough: its package need not be here.
  by_name = {recipe.tokenizer, subject.tokenizer} <= set(TOKENIZERS)
  if by_name and recipe.tokenizer == subject.tokenizer:
    return
  own = None if by_name else load_tokenizer(subject.tokenizer, subject.folder).hash
  if own != recipe.tokenizer_hash:
    raise ValueError(
      f"{folder} was made with the tokenizer {recipe.tokenizer!r}, {subject.folder} with"
      f" {str(subject.tokenizer)!r}, which is another: prepare the text with that one."
    )


def own_corpus(subject: Subject) -> Corpus:
  """What the run was trained on."""
  if subject.identity is None:
    raise ValueError(f"{subject.folder} has no text of its own: name one by --corpus or --input.")
  folder = pathlib.Path(subject.config.data.corpus or subject.folder / "corpus")
  if not folder.is_dir():
    raise ValueError(f"the corpus of the run, {folder}, is not there: name it by --corpus.")
  corpus = open_corpus(folder)
  if corpus.identity() != subject.identity:
    raise ValueError(f"{folder} is no longer what the run was trained on: name it by --corpus.")
  return corpus


@contextlib.contextmanager
def prepared(subject: Subject, source: str, text_field: str) -> Iterator[Corpus]:
  """Text files as tokens of the model, all in the split `train`, in a folder that goes again."""
  tokenizer = tokenizer_of(subject)
  with tempfile.TemporaryDirectory() as folder:
    eos = tokenizer.eos is not None
    path = shipped_corpus() if source == SHIPPED else source
    prepare(path, f"{folder}/corpus", tokenizer, validation=0.0, eos=eos, text_field=text_field)
    yield open_corpus(f"{folder}/corpus")


def configure(subject: Subject, length: int | None, batch: int | None) -> TrainConfig:
  """How the batches are computed: as in the run, if these devices have its mesh."""
  cfg = subject.config
  length, batch = length or cfg.data.length, batch or cfg.data.batch
  try:
    sharding.make_mesh(cfg.mesh.sizes())
    mesh = cfg.mesh
  except ValueError:
    mesh = MeshConfig()
    print(f"other devices than in the run: batches are split over {jax.device_count()}")
  chunk = next(n for n in range(min(cfg.loss_chunk, length), 0, -1) if length % n == 0)
  return dataclasses.replace(
    cfg,
    data=dataclasses.replace(cfg.data, length=length, batch=batch),
    mesh=mesh,
    loss_chunk=chunk,
    grad_accum=1,
    tokens=length * batch,
  )


def measure(subject: Subject, cfg: TrainConfig, split: Split, batches: int | None) -> dict:
  """Loss per token, perplexity, accuracy and, where all of the text is read, bits per byte."""
  text = SplitText(split, length=cfg.data.length, batch=cfg.data.batch)
  if not text.batches:
    raise ValueError(f"the split {split.name!r} of {split.folder} has no text.")
  total = min(text.batches, batches or text.batches)
  bar = lambda rows: iter(tqdm(rows, total=total, desc="evaluating", unit="batch"))
  found = evaluate(subject.model, cfg, [Validation(text, batches, bar)], subject.step or 0)
  found = {name.removeprefix("validation_"): number for name, number in found.items()}
  if not math.isfinite(found["loss"]):
    raise ValueError(f"the loss is {found['loss']}: the model computes no finite numbers.")
  return dict(perplexity=math.exp(found["loss"])) | found


def per_word(found: dict, corpus: Corpus, split: Split) -> dict:
  """Perplexities per byte and per word, between spaces, of a split that was read whole."""
  if "bits_per_byte" not in found:
    return {}
  nats = found["bits_per_byte"] * math.log(2) * split.bytes
  return dict(
    byte_perplexity=2 ** found["bits_per_byte"],
    word_perplexity=math.exp(nats / max(count_words(corpus.tokenizer(), split), 1)),
  )


def count_words(tokenizer: Tokenizer, split: Split, block: int = 1 << 20) -> int:
  """Words of all documents; each, from bos on, is decoded as a whole, so none is cut in two."""
  words, rest = 0, np.zeros(0, np.int32)
  for start in range(0, split.tokens, block):
    tokens, _ = split.read(start, min(start + block, split.tokens))
    rest = np.concatenate([rest, tokens])
    *whole, rest = np.split(rest, np.flatnonzero(rest == tokenizer.bos))
    words += sum(len(tokenizer.decode(ids).split()) for ids in whole)
  return words + len(tokenizer.decode(rest).split())


def by_context(
  subject: Subject, cfg: TrainConfig, split: Split, multiples: Sequence[int], batches: int | None
) -> dict:
  """Loss in contexts of so many times the length, and there by position."""
  length, most = cfg.data.length, max(cfg.data.batch, *multiples)
  # Batches of any length have as many tokens, or nearly so.
  sizes = {length * n: max(most // n, 1) for n in multiples}
  texts = {n: (SplitText(split, length=n, batch=rows), rows) for n, rows in sizes.items()}
  return evaluate(subject.model, cfg, [LossByPosition(texts, batches)], subject.step or 0)
