"""What models are trained on: tasks, one of them text."""

from deltanet_jax.data.corpus import (
  TOKENIZERS,
  Corpus,
  CorpusTask,
  Split,
  Tokenizer,
  load_tokenizer,
  open_corpus,
  shipped_corpus,
)
from deltanet_jax.data.task import Batch, Task, training_batches

__all__ = [
  "TOKENIZERS",
  "Batch",
  "Corpus",
  "CorpusTask",
  "Split",
  "Task",
  "Tokenizer",
  "load_tokenizer",
  "open_corpus",
  "shipped_corpus",
  "training_batches",
]
