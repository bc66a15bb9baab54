"""Training tasks: language modeling on text corpora, and synthetic tasks."""

from deltanet_jax.data.corpus import (
  TOKENIZERS,
  Corpus,
  CorpusTask,
  PlantedRecallText,
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
from deltanet_jax.data.synthetic import MQAR, RegBench, StateTracking, SyntheticTask, mad
from deltanet_jax.data.task import Batch, Task, ValidationSource, training_batches

__all__ = [
  "MQAR",
  "TOKENIZERS",
  "Batch",
  "Corpus",
  "CorpusTask",
  "PlantedRecallText",
  "RegBench",
  "Split",
  "SplitText",
  "StateTracking",
  "SyntheticTask",
  "Task",
  "Tokenizer",
  "ValidationSource",
  "find_tokenizer",
  "keep_tokenizer",
  "load_tokenizer",
  "mad",
  "open_corpus",
  "shipped_corpus",
  "training_batches",
  "vocabulary_mismatch",
]
