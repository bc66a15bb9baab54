"""Bigram and trigram models of tokens: what a language model has to beat.

Interpolated Kneser-Ney. With c the counts of n-grams (for shorter ones: of different tokens before
them), c(h) their sum over the tokens after the context h and N(h) how many different ones there
are, p(w | h) = max(c(h w) - d, 0) / c(h) + d N(h) / c(h) p(w | h'), h' without the first token of h
and the shortest model uniform. A context never seen has p(w | h) = p(w | h').
"""

import dataclasses

import numpy as np

from deltanet_jax.data import Split


@dataclasses.dataclass(frozen=True)
class _Level:
  """Counts of n-grams of one length; keys are numbers in base `vocab`, sorted."""

  length: int
  grams: np.ndarray
  counts: np.ndarray
  contexts: np.ndarray
  totals: np.ndarray
  kinds: np.ndarray
  discount: float


def _find(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """values where keys are the wanted ones, 0 where there is no such key."""
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
    kinds=np.bincount(of),
    # The usual estimate n1 / (n1 + 2 n2), with halves added to stay between 0 and 1.
    discount=float((once + 0.5) / (once + 2 * twice + 1)),
  )


def grams(tokens: np.ndarray, documents: np.ndarray, order: int, vocab: int) -> np.ndarray:
  """Each token but bos with the `order` - 1 before it as one number in base `vocab`.

  Args:
    tokens: of documents that begin with bos, which also stands for all that would be before it.
    documents: the number of each token's document.
  """
  if vocab**order >= 1 << 63:
    raise ValueError(f"{order} tokens of {vocab} kinds do not fit into 64 bits: use a lower order.")
  place = np.arange(len(tokens))
  begin = np.flatnonzero(np.diff(documents, prepend=documents[0] - 1))
  begin = begin[documents - documents[0]]
  keys = np.zeros(len(tokens), np.int64)
  for back in range(order - 1, -1, -1):
    keys = keys * vocab + tokens[np.maximum(place - back, begin)]
  return keys[place != begin]


def fit(train: np.ndarray, order: int, vocab: int) -> list[_Level]:
  """The model of order 1, 2, .. `order` from the n-grams of a text."""
  levels = [_level(order, train, vocab)]
  for length in range(order - 1, 0, -1):
    # Different n-grams that end alike: how many tokens came before what they share.
    levels.append(_level(length, levels[-1].grams % vocab**length, vocab))
  return levels[::-1]


def probabilities(levels: list[_Level], wanted: np.ndarray, vocab: int) -> np.ndarray:
  """p of the last token of each n-gram given those before it."""
  p = np.full(len(wanted), 1 / vocab)
  for level in levels:
    grams = wanted % vocab**level.length
    count = _find(level.grams, level.counts, grams)
    total = _find(level.contexts, level.totals, grams // vocab)
    kinds = _find(level.contexts, level.kinds, grams // vocab)
    seen = np.maximum(count - level.discount, 0) + level.discount * kinds * p
    p = np.where(total > 0, seen / np.maximum(total, 1), p)
  return p


def bits_per_byte(train: Split, validation: Split, *, order: int, vocab: int) -> float:
  """Bits that a model of this order, counted on `train`, needs per byte of `validation`'s text."""
  known = grams(*train.read(0, train.tokens), order, vocab)
  wanted = grams(*validation.read(0, validation.tokens), order, vocab)
  p = probabilities(fit(known, order, vocab), wanted, vocab)
  return float(-np.sum(np.log2(p)) / validation.bytes)
