"""MAD's selective copying, memorising and compression."""

import numpy as np

from deltanet_jax.data.synthetic.base import SHARED, SyntheticTask, as_batch


class SelectiveCopy(SyntheticTask):
  """Tokens among blanks, then a sign to copy, then as many blanks at which they are the targets.

  The sign is the last id, a blank the one before. Each of the other blanks stands before one of the
  tokens, which is drawn uniformly; so the last token is right before the sign.
  """

  def __init__(self, *, vocab: int, length: int, copied: int = 16, **sets):
    if vocab < 3:
      raise ValueError(f"vocab is {vocab}, expected at least 3: a token, the blank and the sign.")
    if copied < 1 or length <= 2 * copied + 1:
      raise ValueError(
        f"length is {length} for {copied} tokens to copy, expected more than twice as many and 1,"
        " and at least 1 of them."
      )
    super().__init__(vocab=vocab, length=length, **sets)
    self._copied = copied

  def settings(self):
    return dict(vocab=self.vocab, length=self.shape[1], copied=self._copied)

  def draw(self, random, rows, *, held_out):
    n, length = self._copied, self.shape[1]
    row = np.arange(rows)[:, None]
    content = random.integers(0, self.vocab - 2, (rows, n))
    before = random.integers(0, n, (rows, length - 2 * n - 1))
    blanks = np.bincount((row * n + before).ravel(), minlength=rows * n).reshape(rows, n)
    tokens = np.full((rows, length), self.vocab - 2)
    tokens[row, np.arange(n) + np.cumsum(blanks, axis=1)] = content
    tokens[:, length - n - 1] = self.vocab - 1
    targets, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
    targets[:, length - n :], mask[:, length - n :] = content, True
    return as_batch(tokens, targets, mask)


class Memorize(SyntheticTask):
  """Keys, each followed by a sign at which the key's value is the target.

  Which value a key has is drawn once for all examples, one-to-one, and no value is ever shown: it
  can only be learned from targets. Keys are the lower half of the ids, the sign is the last one.
  """

  def __init__(self, *, vocab: int, length: int, **sets):
    if vocab < 3:
      raise ValueError(f"vocab is {vocab}, expected at least 3: a key, a value and the sign.")
    if length % 2 or length < 2:
      raise ValueError(f"length is {length}, expected an even number of at least 2.")
    super().__init__(vocab=vocab, length=length, **sets)
    keys = (vocab - 1) // 2
    self.values = self.random(SHARED).permutation(np.arange(keys, vocab - 1))[:keys]

  def settings(self):
    return dict(vocab=self.vocab, length=self.shape[1])

  def draw(self, random, rows, *, held_out):
    tokens = np.full((rows, self.shape[1]), self.vocab - 1)
    tokens[:, ::2] = random.integers(0, len(self.values), (rows, self.shape[1] // 2))
    targets, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
    targets[:, 1::2], mask[:, 1::2] = self.values[tokens[:, ::2]], True
    return as_batch(tokens, targets, mask)


class Compress(SyntheticTask):
  """Random tokens and a sign at the end; every target is the token itself.

  For a model that has to tell all of them from what it has at the sign, MAD's autoencoder: a model
  of the next token sees each target at its own place.
  """

  def __init__(self, *, vocab: int, length: int, **sets):
    if vocab < 2 or length < 2:
      raise ValueError(f"vocab is {vocab} and length {length}, expected at least 2 of both.")
    super().__init__(vocab=vocab, length=length, **sets)

  def settings(self):
    return dict(vocab=self.vocab, length=self.shape[1])

  def draw(self, random, rows, *, held_out):
    tokens = random.integers(0, self.vocab - 1, (rows, self.shape[1]))
    tokens[:, -1] = self.vocab - 1
    return as_batch(tokens, tokens, np.ones(tokens.shape, bool))
