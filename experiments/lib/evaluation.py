"""Load a model and a text to evaluate it on, and check that their tokens match."""

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
  Task,
  Tokenizer,
  find_tokenizer,
  load_tokenizer,
  open_corpus,
  shipped_corpus,
  vocabulary_mismatch,
)
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.eval import LossByPosition, Validation, evaluate
from deltanet_jax.files import as_path
from deltanet_jax.interop import load_fla
from deltanet_jax.models import LM
from deltanet_jax.models.abstract import digest, weights_of
from deltanet_jax.train import Evaluator, load_trained
from deltanet_jax.train import workdir as folders

SHIPPED = "shipped"
SPLITS = ("validation", "train")


@dataclasses.dataclass(frozen=True)
class Subject:
  """A model to evaluate."""

  model: LM
  config: TrainConfig  # of its run; for a public checkpoint, only model and data are meaningful
  folder: pathlib.Path
  tokenizer: str | pathlib.Path | None  # as in `load_tokenizer(tokenizer, folder)`
  step: int | None
  history: dict  # of its run: initial weights and extensions
  identity: dict | None  # of the task of its run

  def facts(self) -> dict:
    """Return what identifies the model in the key of a record."""
    sha256 = digest(jax.device_get(weights_of(self.model)))
    return dict(model=self.folder.resolve().name, step=self.step, weights=sha256[:12])

  def remarks(self) -> dict:
    """Return initial weights and extensions of its run, for a record; paths by their last name."""
    initial, extended = self.history.get("initial"), self.history.get("extended")
    remarks = {}
    if initial:
      remarks |= dict(initial=initial | dict(path=pathlib.Path(initial["path"]).name))
    if extended:
      remarks |= dict(extended=[{x: one[x] for x in ("step", "from", "to")} for one in extended])
    return remarks


def open_run(folder: str, step: int | None, tokenizer: str | None, *, text: bool = True) -> Subject:
  """Load the model of a run or of exported weights, which store their tokenizer.

  Args:
    text: whether the model is evaluated on text; ValueError if it was not trained on text.
  """
  trained = load_trained(folder, step)
  if text:
    check_text(trained.folder, trained.tokenizer)
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


def check_text(folder: pathlib.Path, tokenizer: str | pathlib.Path | None):
  """Raise ValueError if a run has no tokenizer."""
  if tokenizer is None:
    raise ValueError(f"{folder} was not trained on text: name its task by --task=module:function.")


def open_public(folder: str, tokenizer: str | None) -> Subject:
  """Load a public checkpoint, with the given tokenizer or the one in its folder, if any."""
  model = load_fla(folder)
  tokenizer = tokenizer or find_tokenizer(folder)
  if tokenizer not in (None, *TOKENIZERS):
    tokenizer = as_path(tokenizer).resolve()
  cfg = TrainConfig(model=model.cfg, data=DataConfig(length=2048, batch=8))
  return Subject(model, cfg, as_path(folder), tokenizer, None, {}, None)


def tokenizer_of(subject: Subject) -> Tokenizer:
  """Load the model's tokenizer and check its vocabulary size."""
  if subject.tokenizer is None:
    raise ValueError("the tokenizer of this model is unknown: set --tokenizer.")
  tokenizer = load_tokenizer(subject.tokenizer, subject.folder)
  if odd := vocabulary_mismatch(tokenizer.vocab, subject.model.cfg.vocab):
    raise ValueError(f"{odd}: {subject.tokenizer} is not the tokenizer of this model.")
  return tokenizer


def check_tokens(subject: Subject, corpus: Corpus):
  """Raise ValueError if the corpus was prepared with another tokenizer than the model's."""
  recipe, folder = corpus.manifest.recipe, corpus.train.folder
  if subject.tokenizer is None:
    if odd := vocabulary_mismatch(recipe.vocab, subject.model.cfg.vocab):
      raise ValueError(f"{folder}: {odd}; prepare the text with the tokenizer of the model.")
    return
  # Compare names where they suffice: the tokenizer's package need not be installed.
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
  """Open the corpus that the run was trained on."""
  if subject.identity is None:
    raise ValueError(f"{subject.folder} has no text of its own: name one by --corpus or --input.")
  folder = as_path(subject.config.data.corpus or subject.folder / "corpus")
  if not folder.is_dir():
    raise ValueError(f"the corpus of the run, {folder}, does not exist: name it by --corpus.")
  corpus = open_corpus(folder)
  if corpus.identity() != subject.identity:
    raise ValueError(
      f"{folder} has changed since the run was trained on it: name the original by --corpus."
    )
  return corpus


@contextlib.contextmanager
def prepared(subject: Subject, source: str, text_field: str) -> Iterator[Corpus]:
  """Tokenize text files for the model, all into the split `train` of a temporary corpus."""
  tokenizer = tokenizer_of(subject)
  with tempfile.TemporaryDirectory() as folder:
    eos = tokenizer.eos is not None
    path = shipped_corpus() if source == SHIPPED else source
    prepare(path, f"{folder}/corpus", tokenizer, validation=0.0, eos=eos, text_field=text_field)
    yield open_corpus(f"{folder}/corpus")


def configure(subject: Subject, length: int | None, batch: int | None) -> TrainConfig:
  """Return the run's config with this batch shape, and its mesh if these devices allow it.

  `data.scored` is a limit for sequences of the training length: another length drops it.
  """
  data, mesh = subject.config.data, subject.config.mesh
  try:
    sharding.make_mesh(mesh.sizes())
  except ValueError:
    mesh = MeshConfig()
    print(f"the mesh of the run does not fit these devices: using data={jax.device_count()}")
  length = length or data.length
  scored = data.scored if length == data.length else None
  data = dataclasses.replace(data, length=length, batch=batch or data.batch, scored=scored)
  return dataclasses.replace(subject.config, data=data, mesh=mesh)


def measure(subject: Subject, cfg: TrainConfig, split: Split, batches: int | None) -> dict:
  """Return loss per token, perplexity, accuracy and, if all of the text is read, bits per byte."""
  text = SplitText(split, length=cfg.data.length, batch=cfg.data.batch)
  if not text.batches:
    raise ValueError(f"the split {split.name!r} of {split.folder} has no text.")
  total = min(text.batches, batches or text.batches)
  bar = lambda batches: iter(tqdm(batches, total=total, desc="evaluating", unit="batch"))
  found = evaluate(subject.model, cfg, [Validation(text, batches, bar)], subject.step or 0)
  found = {name.removeprefix("validation_"): number for name, number in found.items()}
  if not math.isfinite(found["loss"]):
    raise ValueError(f"the loss is {found['loss']}: the model's outputs are non-finite.")
  return dict(perplexity=math.exp(found["loss"])) | found


def measure_task(
  subject: Subject,
  cfg: TrainConfig,
  task: Task,
  evaluators: Sequence[Evaluator],
  batches: int | None,
) -> dict:
  """Return the validation metrics of a task that need not be text, and those of the evaluators."""
  every = [Validation(task, batches), *evaluators]
  return evaluate(subject.model, cfg, every, subject.step or 0)


def per_word(found: dict, corpus: Corpus, split: Split) -> dict:
  """Return perplexity per byte and per whitespace-separated word, if the full split was read."""
  if "bits_per_byte" not in found:
    return {}
  nats = found["bits_per_byte"] * math.log(2) * split.bytes
  return dict(
    byte_perplexity=2 ** found["bits_per_byte"],
    word_perplexity=math.exp(nats / max(count_words(corpus.tokenizer(), split), 1)),
  )


def count_words(tokenizer: Tokenizer, split: Split, block: int = 1 << 20) -> int:
  """Count the words of all documents; decodes complete documents, so that no word is split."""
  words, rest = 0, np.zeros(0, np.int32)
  for start in range(0, split.tokens, block):
    tokens, _ = split.read(start, min(start + block, split.tokens))
    rest = np.concatenate([rest, tokens])
    *complete, rest = np.split(rest, np.flatnonzero(rest == tokenizer.bos))
    words += sum(len(tokenizer.decode(ids).split()) for ids in complete)
  return words + len(tokenizer.decode(rest).split())


def by_context(
  subject: Subject, cfg: TrainConfig, split: Split, multiples: Sequence[int], batches: int | None
) -> dict:
  """Return the loss at multiples of the sequence length, in total and by position."""
  length, most = cfg.data.length, max(cfg.data.batch, *multiples)
  # Batches of all lengths have about the same number of tokens.
  sizes = {length * n: max(most // n, 1) for n in multiples}
  texts = {n: (SplitText(split, length=n, batch=size), size) for n, size in sizes.items()}
  return evaluate(subject.model, cfg, [LossByPosition(texts, batches)], subject.step or 0)
