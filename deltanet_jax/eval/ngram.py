"""N-gram language models: the baseline of a language model.

Interpolated Kneser-Ney smoothing. c is the count of an n-gram (for lower orders: its number of
distinct preceding tokens), c(h) the sum over the tokens after the context h, N(h) the number of
distinct tokens after it, and h' is h without its first token:

  p(w | h) = max(c(h w) - d, 0) / c(h) + d N(h) / c(h) p(w | h')

The lowest order interpolates with a uniform distribution. An unseen context has
p(w | h) = p(w | h').
"""

import dataclasses

import numpy as np

from deltanet_jax.data import Split


@dataclasses.dataclass(frozen=True)
class _Level:
  """Counts of n-grams of one length; n-grams are integers in base `vocab`, sorted."""

  length: int
  grams: np.ndarray
  counts: np.ndarray
  contexts: np.ndarray
  totals: np.ndarray
  distinct: np.ndarray  # tokens after each context
  discount: float


def _find(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """Look up the values of keys; 0 for a missing key."""
  at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[at] == wanted, values[at], 0)


def _level(length: int, grams: np.ndarray, vocab: int) -> _Level:
  grams, counts = np.unique(grams, return_counts=True)
  contexts, of = np.unique(grams // vocab, return_inverse=True)
  once, twice = np.sum(counts == 1), np.sum(counts == 2)
  return _Level(
    length=length,
    grams=grams,
    counts=counts,
    contexts=contexts,
    totals=np.bincount(of, counts),
    distinct=np.bincount(of),
    # The usual estimate n1 / (n1 + 2 n2), smoothed to stay between 0 and 1.
    discount=float((once + 0.5) / (once + 2 * twice + 1)),
  )


def grams(tokens: np.ndarray, documents: np.ndarray, order: int, vocab: int) -> np.ndarray:
  """Return the n-gram that ends at each token except bos, as an integer in base `vocab`.

  Args:
    tokens: of documents that start with bos, which also pads contexts on the left.
    documents: document index of each token.
  """
  if vocab**order >= 1 << 63:
    raise ValueError(f"{order} tokens of {vocab} kinds do not fit into 64 bits: use a lower order.")
  index = np.arange(len(tokens))
  start = np.flatnonzero(np.diff(documents, prepend=documents[0] - 1))
  start = start[documents - documents[0]]
  keys = np.zeros(len(tokens), np.int64)
  for back in range(order - 1, -1, -1):
    keys = keys * vocab + tokens[np.maximum(index - back, start)]
  return keys[index != start]


def fit(train: np.ndarray, order: int, vocab: int) -> list[_Level]:
  """Fit models of order 1, 2, .. `order` to the n-grams of a text."""
  levels = [_level(order, train, vocab)]
  for length in range(order - 1, 0, -1):
    # Distinct n-grams with the same ending count its distinct preceding tokens.
    levels.append(_level(length, levels[-1].grams % vocab**length, vocab))
  return levels[::-1]


def probabilities(levels: list[_Level], wanted: np.ndarray, vocab: int) -> np.ndarray:
  """Return p of the last token of each n-gram given those before it."""
  p = np.full(len(wanted), 1 / vocab)
  for level in levels:
    grams = wanted % vocab**level.length
    count = _find(level.grams, level.counts, grams)
    total = _find(level.contexts, level.totals, grams // vocab)
    distinct = _find(level.contexts, level.distinct, grams // vocab)
    seen = np.maximum(count - level.discount, 0) + level.discount * distinct * p
    p = np.where(total > 0, seen / np.maximum(total, 1), p)
  return p


def bits_per_byte(train: Split, validation: Split, *, order: int, vocab: int) -> float:
  """Return validation bits per byte of an n-gram model of this order fitted to `train`."""
  known = grams(*train.read(0, train.tokens), order, vocab)
  wanted = grams(*validation.read(0, validation.tokens), order, vocab)
  p = probabilities(fit(known, order, vocab), wanted, vocab)
  return float(-np.sum(np.log2(p)) / validation.bytes)
