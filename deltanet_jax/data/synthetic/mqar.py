"""Multi-query associative recall (MQAR): key-value pairs, then a query for every key."""

import numpy as np

from deltanet_jax.data.synthetic.base import SyntheticTask, as_batch, distinct


class MQAR(SyntheticTask):
  """k1 v1 k2 v2 .., then the keys among zeros; the target at each key is its value.

  Keys and values are drawn without replacement, keys from 1 to V/2 - 1, values above. Slots of two
  tokens follow the pairs; queries are assigned to slots without replacement, slot g with weight
  (g + 1)^(power - 1), so most queries come early. Targets are the values at the positions of the
  queries, where the input does not contain them; only these positions are scored.
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
    vocab: Vocabulary size V.
    length: Sequence length.
    pairs: Key-value pairs per example.
    batch: Global batch size.
    seed: Of all examples.
    examples: Size of the training set; None draws fresh examples for every batch.
    shuffle: Whether to reshuffle a fixed set in every epoch.
    validation_examples: Size of the validation set.
    test_examples: Size of the test set.
    power: Exponent of the distribution of query positions.
    random_non_queries: Draw tokens that are neither pairs nor queries from the full vocabulary
      instead of using 0.
    """
    if length % 2 or length < 4 or pairs < 1 or 4 * pairs > length:
      raise ValueError(
        f"length is {length} with {pairs} pairs, expected pairs >= 1 and an even"
        " length >= 4 * pairs."
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

  def draw(self, random, examples, *, evaluation):
    K, half, length = self.pairs, self.vocab // 2, self.shape[1]
    keys = 1 + distinct(random, half - 1, (examples, K))
    values = half + distinct(random, self.vocab - half, (examples, K))
    # Weighted sampling without replacement: order statistics of exponentials with these rates.
    slots = np.arange((length - 2 * K) // 2)
    times = random.standard_exponential((examples, len(slots))) / (slots + 1) ** (self._power - 1)
    queries = 2 * K + 2 * np.argsort(times, axis=1)[:, :K]
    tokens = np.zeros((examples, length), np.int32)
    tokens[:, 0 : 2 * K : 2], tokens[:, 1 : 2 * K : 2] = keys, values
    targets, example = np.zeros_like(tokens), np.arange(examples)[:, None]
    tokens[example, queries], targets[example, queries] = keys, values
    if self._random_non_queries:
      tokens = np.where(tokens == 0, random.integers(0, self.vocab, tokens.shape), tokens)
    return as_batch(tokens, targets, targets > 0)
