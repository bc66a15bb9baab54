"""Language modelling of a prepared corpus as a task."""

import hashlib

from deltanet_jax.data.corpus.rows import ShuffledRows, evaluation_batches
from deltanet_jax.data.corpus.shards import Corpus
from deltanet_jax.data.corpus.tokenizer import TOKENIZERS, keep_tokenizer, vocabulary_mismatch
from deltanet_jax.data.task import Task


class CorpusTask(Task):
  """The next token of packed documents; the validation split is what is held out."""

  def __init__(self, corpus: Corpus, *, length: int, batch: int, seed: int = 0):
    self.corpus, self.shape = corpus, (batch, length)
    self.vocab = corpus.manifest.recipe.vocab
    self._rows = ShuffledRows(corpus.train, length=length, batch=batch, seed=seed)
    self.validation_bytes = corpus.validation.bytes

  def identity(self):
    """Hashes of the tokenizer and of all tokens in their order, wherever the files lie."""
    manifest = self.corpus.manifest
    shards = manifest.train.shards + manifest.validation.shards
    sums = [manifest.recipe.tokenizer_hash, *(shard.bin_sha256 for shard in shards)]
    corpus = hashlib.sha256("\n".join(sums).encode()).hexdigest()
    return dict(tokenizer=manifest.recipe.tokenizer_hash, corpus=corpus)

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
    split, (batch, length) = self.corpus.validation, self.shape
    if split.tokens < 2:
      return iter(())
    return evaluation_batches(split, length=length, batch=batch, host=host, hosts=hosts)
