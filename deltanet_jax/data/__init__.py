"""What models are trained on: tasks, one of them text."""

from deltanet_jax.data.corpus import (
  TOKENIZERS,
  Corpus,
  CorpusTask,
  Planted,
  Split,
  SplitText,
  Tokenizer,
  find_tokenizer,
  keep_tokenizer,
  load_tokenizer,
  open_corpus,
  shipped_corpus,
  vocabulary_mismatch,
)
from deltanet_jax.data.synthetic import MQAR, Drawn, RegBench, StateTracking, mad
from deltanet_jax.data.task import Batch, HeldOut, Task, training_batches

__all__ = [
  "MQAR",
  "TOKENIZERS",
  "Batch",
  "Corpus",
  "CorpusTask",
  "Drawn",
  "HeldOut",
  "Planted",
  "RegBench",
  "Split",
  "SplitText",
  "StateTracking",
  "Task",
  "Tokenizer",
  "find_tokenizer",
  "keep_tokenizer",
  "load_tokenizer",
  "mad",
  "open_corpus",
  "shipped_corpus",
  "training_batches",
  "vocabulary_mismatch",
]
