"""Text corpora: tokenization to shards on disk, and batches of packed sequences."""

from deltanet_jax.data.corpus.planted_recall import PlantedRecallText
from deltanet_jax.data.corpus.shards import Corpus, Split, open_corpus
from deltanet_jax.data.corpus.task import CorpusTask, SplitText
from deltanet_jax.data.corpus.text import shipped_corpus
from deltanet_jax.data.corpus.tokenizer import (
  TOKENIZERS,
  Tokenizer,
  find_tokenizer,
  keep_tokenizer,
  load_tokenizer,
  vocabulary_mismatch,
)

__all__ = [
  "TOKENIZERS",
  "Corpus",
  "CorpusTask",
  "PlantedRecallText",
  "Split",
  "SplitText",
  "Tokenizer",
  "find_tokenizer",
  "keep_tokenizer",
  "load_tokenizer",
  "open_corpus",
  "shipped_corpus",
  "vocabulary_mismatch",
]
