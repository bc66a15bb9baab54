"""MAD tasks: selective copying, memorization and compression."""

import numpy as np

from deltanet_jax.data.synthetic.base import SHARED, SyntheticTask, as_batch


class SelectiveCopy(SyntheticTask):
  """Copy tokens among blanks: after a copy token, they are the targets at as many blanks.

  The copy token is the last id, the blank the one before. Each of the other blanks is placed before
  a uniformly drawn token; so the last token is right before the copy token.
  """

  def __init__(self, *, vocab: int, length: int, copied: int = 16, **sets):
    if vocab < 3:
      raise ValueError(
        f"vocab is {vocab}, expected at least 3: a token, the blank and the copy token."
      )
    if copied < 1 or length <= 2 * copied + 1:
      raise ValueError(
        f"length is {length} and copied is {copied}, expected copied >= 1 and"
        " length > 2 * copied + 1."
      )
    super().__init__(vocab=vocab, length=length, **sets)
    self._copied = copied

  def settings(self):
    return dict(vocab=self.vocab, length=self.shape[1], copied=self._copied)

  def draw(self, random, examples, *, evaluation):
    n, length = self._copied, self.shape[1]
    example = np.arange(examples)[:, None]
    content = random.integers(0, self.vocab - 2, (examples, n))
    before = random.integers(0, n, (examples, length - 2 * n - 1))
    blanks = np.bincount((example * n + before).ravel(), minlength=examples * n).reshape(
      examples, n
    )
    tokens = np.full((examples, length), self.vocab - 2)
    tokens[example, np.arange(n) + np.cumsum(blanks, axis=1)] = content
    tokens[:, length - n - 1] = self.vocab - 1
    targets, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
    targets[:, length - n :], mask[:, length - n :] = content, True
    return as_batch(tokens, targets, mask)


class Memorize(SyntheticTask):
  """Memorize a map: each key is followed by a query token, whose target is the key's value.

  The one-to-one map from keys to values is drawn once for all examples. Values never appear in the
  input: they can only be learned from targets. Keys are the lower half of the ids, the query token
  is the last one.
  """

  def __init__(self, *, vocab: int, length: int, **sets):
    if vocab < 3:
      raise ValueError(
        f"vocab is {vocab}, expected at least 3: a key, a value and the query token."
      )
    if length % 2 or length < 2:
      raise ValueError(f"length is {length}, expected an even number of at least 2.")
    super().__init__(vocab=vocab, length=length, **sets)
    keys = (vocab - 1) // 2
    self.values = self.random(SHARED).permutation(np.arange(keys, vocab - 1))[:keys]

  def settings(self):
    return dict(vocab=self.vocab, length=self.shape[1])

  def draw(self, random, examples, *, evaluation):
    tokens = np.full((examples, self.shape[1]), self.vocab - 1)
    tokens[:, ::2] = random.integers(0, len(self.values), (examples, self.shape[1] // 2))
    targets, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
    targets[:, 1::2], mask[:, 1::2] = self.values[tokens[:, ::2]], True
    return as_batch(tokens, targets, mask)


class Compress(SyntheticTask):
  """Random tokens and a final token; every target is the token itself.

  For an autoencoder that reconstructs all tokens from its hidden state at the final token, as in
  MAD: a causal language model sees each target in its input.
  """

  def __init__(self, *, vocab: int, length: int, **sets):
    if vocab < 2 or length < 2:
      raise ValueError(f"vocab is {vocab} and length {length}, expected at least 2 of both.")
    super().__init__(vocab=vocab, length=length, **sets)

  def settings(self):
    return dict(vocab=self.vocab, length=self.shape[1])

  def draw(self, random, examples, *, evaluation):
    tokens = random.integers(0, self.vocab - 1, (examples, self.shape[1]))
    tokens[:, -1] = self.vocab - 1
    return as_batch(tokens, tokens, np.ones(tokens.shape, bool))
