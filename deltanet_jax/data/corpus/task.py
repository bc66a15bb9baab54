"""Language modelling of a prepared corpus as a task."""

from deltanet_jax.data.corpus.sequences import ShuffledSequences, count_batches, evaluation_batches
from deltanet_jax.data.corpus.shards import Corpus, Split
from deltanet_jax.data.corpus.tokenizer import TOKENIZERS, keep_tokenizer, vocabulary_mismatch
from deltanet_jax.data.task import Task, ValidationSource


class SplitText(ValidationSource):
  """All of a split in order, packed as in training; no batches where it has no text."""

  def __init__(self, split: Split, *, length: int, batch: int):
    self._split, self._rows = split, dict(length=length, batch=batch)
    self.validation_bytes = split.bytes

  @property
  def batches(self) -> int:
    """How many there are."""
    return count_batches(self._split, **self._rows)

  def validation(self, host, hosts):
    if self._split.tokens < 2:
      return iter(())
    return evaluation_batches(self._split, **self._rows, host=host, hosts=hosts)


class CorpusTask(Task):
  """The next token of packed documents; the validation split is what is held out."""

  def __init__(self, corpus: Corpus, *, length: int, batch: int, seed: int = 0):
    self.corpus, self.shape = corpus, (batch, length)
    self.vocab = corpus.manifest.recipe.vocab
    self._rows = ShuffledSequences(corpus.train, length=length, batch=batch, seed=seed)
    self._held_out = SplitText(corpus.validation, length=length, batch=batch)
    self.validation_bytes = self._held_out.validation_bytes

  def identity(self):
    return self.corpus.identity()

  def describe(self):
    """The tokenizer as `load_tokenizer(name, folder)` takes it from the folder of `keep`."""
    return dict(tokenizer=self.corpus.manifest.recipe.tokenizer)

  def keep(self, folder):
    recipe = self.corpus.manifest.recipe
    if recipe.tokenizer not in TOKENIZERS:
      keep_tokenizer(self.corpus.tokenizer(), folder)

  def remark(self, vocab):
    odd = vocabulary_mismatch(self.vocab, vocab)
    return odd and f"{self.corpus.train.folder}: {odd}; is model.vocab meant so?"

  def batch(self, step, host, hosts):
    return self._rows.batch(step, host, hosts)

  def validation(self, host, hosts):
    return self._held_out.validation(host, hosts)
