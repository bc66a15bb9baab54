"""N-gram models are normalized and match their formula."""

import collections
import math

import numpy as np
import pytest

from deltanet_jax.data import load_tokenizer, open_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.eval import bits_per_byte, ngram

VOCAB = 7
BOS = 6


def random_text(seed, count=12):
  random = np.random.default_rng(seed)
  weights = random.dirichlet(np.full(BOS, 0.5), BOS)
  tokens, documents = [], []
  for number in range(1, count + 1):
    tokens.append(BOS)
    token = random.integers(BOS)
    for _ in range(random.integers(1, 30)):
      tokens.append(token)
      token = random.choice(BOS, p=weights[token])
    documents += [number] * (len(tokens) - len(documents))
  return np.asarray(tokens, np.int32), np.asarray(documents, np.int32)


def by_the_formula(train, order):
  """Return p(w, h) from the definition, with dictionaries."""
  counts = {order: collections.Counter(train)}
  for n in range(order - 1, 0, -1):
    counts[n] = collections.Counter(gram[1:] for gram in counts[n + 1])

  def p(w, h):
    n = len(h) + 1
    lower = p(w, h[1:]) if h else 1 / VOCAB
    after = [c for gram, c in counts[n].items() if gram[:-1] == h]
    if not after:
      return lower
    once, twice = (sum(c == k for c in counts[n].values()) for k in (1, 2))
    d = (once + 0.5) / (once + 2 * twice + 1)
    return (max(counts[n][(*h, w)] - d, 0) + d * len(after) * lower) / sum(after)

  return p


def tuples(tokens, documents, order):
  found = []
  for number in np.unique(documents):
    text = [BOS] * (order - 1) + tokens[documents == number][1:].tolist()
    found += [tuple(text[i : i + order]) for i in range(len(text) - order + 1)]
  return found


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_are_the_formula_and_sum_to_one(order):
  train, validation = random_text(0), random_text(1)
  levels = ngram.fit(ngram.grams(*train, order, VOCAB), order, VOCAB)
  assert all(0 < level.discount < 1 for level in levels)
  got = ngram.probabilities(levels, ngram.grams(*validation, order, VOCAB), VOCAB)
  p = by_the_formula(tuples(*train, order), order)
  np.testing.assert_allclose(
    got, [p(g[-1], g[:-1]) for g in tuples(*validation, order)], rtol=1e-12
  )
  # All contexts, seen or not.
  every = ngram.probabilities(levels, np.arange(VOCAB**order), VOCAB)
  np.testing.assert_allclose(every.reshape(-1, VOCAB).sum(1), 1, rtol=1e-12)
  assert every.min() > 0


def test_repetitive_text_has_almost_zero_bits(tmp_path):
  for i in range(40):
    (tmp_path / f"{i:02}.txt").write_text("abcd" * 200)
  prepare(tmp_path, tmp_path / "out", load_tokenizer("bytes"), validation=0.1, eos=False)
  corpus = open_corpus(tmp_path / "out")
  bits = {n: bits_per_byte(corpus.train, corpus.validation, order=n, vocab=258) for n in (1, 2, 3)}
  assert math.isclose(bits[1], 2, abs_tol=0.01)
  assert bits[2] < 0.02 and bits[3] < 0.02


def test_an_overflowing_order_raises():
  tokens, documents = random_text(0)
  with pytest.raises(ValueError, match="use a lower order"):
    ngram.grams(tokens, documents, 5, 32000)
