"""Multi-query associative recall: pairs of keys and values, then every key once more."""

import numpy as np

from deltanet_jax.data.synthetic.base import SyntheticTask, as_batch, distinct


class MQAR(SyntheticTask):
  """k1 v1 k2 v2 .. and then the keys among zeros, each to be answered with its value.

  Keys and values of a row are drawn without repetition, keys from 1 to V/2 - 1, values above. After
  the pairs come slots of two tokens; keys are put into slots drawn without repetition, slot g with
  weight (g + 1)^(power - 1), so most queries come soon. Values are the targets at the queries
  themselves and stand nowhere after the pairs; nothing else counts.
  """

  def __init__(
    self,
    vocab: int,
    length: int,
    pairs: int,
    *,
    batch: int,
    seed: int = 0,
    examples: int | None = None,
    shuffle: bool = False,
    validation_examples: int = 1000,
    test_examples: int = 3000,
    power: float = 0.01,
    random_non_queries: bool = False,
  ):
    """Args:
    random_non_queries: tokens that are neither pairs nor queries are drawn from the whole
      vocabulary instead of 0.
    """
    if length % 2 or length < 4 or pairs < 1 or 4 * pairs > length:
      raise ValueError(
        f"length is {length} with {pairs} pairs, expected an even length of at least 4 for each of"
        " 1 or more pairs."
      )
    if vocab <= length:
      raise ValueError(f"vocab is {vocab}, expected more than the length {length}.")
    super().__init__(
      vocab=vocab,
      length=length,
      batch=batch,
      seed=seed,
      examples=examples,
      shuffle=shuffle,
      validation_examples=validation_examples,
      test_examples=test_examples,
    )
    self.pairs, self._power, self._random_non_queries = pairs, power, random_non_queries

  def settings(self):
    return dict(
      vocab=self.vocab,
      length=self.shape[1],
      pairs=self.pairs,
      power=self._power,
      random_non_queries=self._random_non_queries,
    )

  def draw(self, random, rows, *, held_out):
    K, half, length = self.pairs, self.vocab // 2, self.shape[1]
    keys = 1 + distinct(random, half - 1, (rows, K))
    values = half + distinct(random, self.vocab - half, (rows, K))
    # The first of races whose speeds are the weights: a drawing without repetition.
    slots = np.arange((length - 2 * K) // 2)
    times = random.standard_exponential((rows, len(slots))) / (slots + 1) ** (self._power - 1)
    queries = 2 * K + 2 * np.argsort(times, axis=1)[:, :K]
    tokens = np.zeros((rows, length), np.int32)
    tokens[:, 0 : 2 * K : 2], tokens[:, 1 : 2 * K : 2] = keys, values
    targets, row = np.zeros_like(tokens), np.arange(rows)[:, None]
    tokens[row, queries], targets[row, queries] = keys, values
    if self._random_non_queries:
      tokens = np.where(tokens == 0, random.integers(0, self.vocab, tokens.shape), tokens)
    return as_batch(tokens, targets, targets > 0)
