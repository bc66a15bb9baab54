"""Text to tokens on disk, and packed rows of them."""

from deltanet_jax.data.batches import evaluation_batches, training_batches
from deltanet_jax.data.shards import Corpus, Split, open_corpus
from deltanet_jax.data.text import shipped_corpus
from deltanet_jax.data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

__all__ = [
  "TOKENIZERS",
  "Corpus",
  "Split",
  "Tokenizer",
  "evaluation_batches",
  "load_tokenizer",
  "open_corpus",
  "shipped_corpus",
  "training_batches",
]
