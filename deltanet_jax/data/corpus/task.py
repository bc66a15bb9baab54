"""Language modeling on a prepared corpus as a task."""

from deltanet_jax.data.corpus.sequences import ShuffledSequences, count_batches, evaluation_batches
from deltanet_jax.data.corpus.shards import Corpus, Split
from deltanet_jax.data.corpus.tokenizer import TOKENIZERS, keep_tokenizer, vocabulary_mismatch
from deltanet_jax.data.task import Task, ValidationSource


class SplitText(ValidationSource):
  """A split in order, packed as in training; no batches if it has no text."""

  def __init__(self, split: Split, *, length: int, batch: int):
    self._split, self._shape = split, dict(length=length, batch=batch)
    self.validation_bytes = split.bytes

  @property
  def batches(self) -> int:
    """Number of batches."""
    return count_batches(self._split, **self._shape)

  def validation(self, host, hosts):
    if self._split.tokens < 2:
      return iter(())
    return evaluation_batches(self._split, **self._shape, host=host, hosts=hosts)


class CorpusTask(Task):
  """Next-token prediction on packed documents; validates on the validation split."""

  def __init__(self, corpus: Corpus, *, length: int, batch: int, seed: int = 0):
    self.corpus, self.shape = corpus, (batch, length)
    self.vocab = corpus.manifest.recipe.vocab
    self._training = ShuffledSequences(corpus.train, length=length, batch=batch, seed=seed)
    self._validation = SplitText(corpus.validation, length=length, batch=batch)
    self.validation_bytes = self._validation.validation_bytes

  def identity(self):
    return self.corpus.identity()

  def describe(self):
    """Return the tokenizer's name, for `load_tokenizer(name, folder)` after `keep(folder)`."""
    return dict(tokenizer=self.corpus.manifest.recipe.tokenizer)

  def keep(self, folder):
    recipe = self.corpus.manifest.recipe
    if recipe.tokenizer not in TOKENIZERS:
      keep_tokenizer(self.corpus.tokenizer(), folder)

  def remark(self, vocab):
    mismatch = vocabulary_mismatch(self.vocab, vocab)
    return mismatch and f"{self.corpus.train.folder}: {mismatch}; is model.vocab intended?"

  def batch(self, step, host, hosts):
    return self._training.batch(step, host, hosts)

  def validation(self, host, hosts):
    return self._validation.validation(host, hosts)
