"""MAD's in-context recall, with noise or without."""

import numpy as np

from deltanet_jax.data.synthetic.base import SyntheticTask, as_batch


class InContextRecall(SyntheticTask):
  """Pairs of a key and its value, k v k v .., where a key has the same value throughout a row.

  Keys are the lower half of the ids, values the upper one, and noise the `noise_vocab` ids above
  them. Keys and values are drawn with repetition; the last key is one of those shown before. In
  training every next token counts; held out, the values of keys that were shown before.
  """

  identity_name = "Recall"  # in the config.json of existing runs

  def __init__(self, *, vocab: int, length: int, noise: float = 0.0, noise_vocab: int = 0, **sets):
    """Args:
    length: of the sequence; the model reads all but its last token.
    noise: share of the pairs in whose place two noise tokens are drawn.
    sets: of `SyntheticTask`.
    """
    if length % 2 or length < 4:
      raise ValueError(f"length is {length}, expected an even number of at least 4.")
    if not 0 <= noise < 1 or noise_vocab < (1 if noise else 0):
      raise ValueError(
        f"noise is {noise} with {noise_vocab} noise tokens, expected a share of at least 0 and"
        " less than 1, and a noise_vocab to draw it from."
      )
    if vocab - noise_vocab < 2:
      raise ValueError(f"vocab is {vocab} with {noise_vocab} of noise: no key and value are left.")
    super().__init__(vocab=vocab, length=length - 1, **sets)
    self._noise, self._noise_vocab = noise, noise_vocab

  def settings(self):
    return dict(
      vocab=self.vocab,
      length=self.shape[1] + 1,
      noise=self._noise,
      noise_vocab=self._noise_vocab,
    )

  def draw(self, random, rows, *, held_out):
    pairs, tokens = (self.shape[1] + 1) // 2, self.vocab - self._noise_vocab
    n, row = tokens // 2, np.arange(rows)[:, None]
    noise = self._noise_pairs(random, rows, pairs)
    keys = random.integers(0, n, (rows, pairs))
    place = np.where(noise, n, keys)  # noise shows no key: one more column for it
    shown = np.zeros((rows, n + 1), bool)
    shown[row, place[:, :-1]] = True
    keys[:, -1] = place[:, -1] = np.argmax(shown[:, :n] * random.random((rows, n)), axis=1)
    values = random.integers(n, tokens, (rows, n))[row, keys]
    drawn = np.stack([keys, values], axis=2)
    meaningless = random.integers(tokens, self.vocab, drawn.shape) if self._noise else drawn
    drawn = np.where(noise[..., None], meaningless, drawn).reshape(rows, -1)
    first, number = np.full((rows, n + 1), pairs), np.arange(pairs)[None]
    np.minimum.at(first, (row, place), number)
    known = (number > first[row, place]) & ~noise
    mask = np.stack([np.zeros_like(known), known], axis=2).reshape(rows, -1)
    return as_batch(drawn[:, :-1], drawn[:, 1:], mask[:, 1:] if held_out else mask[:, 1:] | True)

  def _noise_pairs(self, random, rows, pairs):
    """`[rows pairs]`, never the last; one drawn pair of a row is none in any case."""
    noise = random.random((rows, pairs)) < self._noise
    noise[np.arange(rows), random.integers(0, pairs, rows)] = False
    noise[:, -1] = False
    # If the drawn one was the last there may be no other: then one of them, for a key to ask for.
    silent = np.flatnonzero(noise[:, :-1].all(axis=1))
    noise[silent, random.integers(0, pairs - 1, len(silent))] = False
    return noise
