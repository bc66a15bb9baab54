"""MAD task: in-context recall, with or without noise."""

import numpy as np

from deltanet_jax.data.synthetic.base import SyntheticTask, as_batch


class InContextRecall(SyntheticTask):
  """Key-value pairs k v k v .., where a key has the same value throughout an example.

  Keys are the lower half of the ids, values the upper one, and noise tokens the `noise_vocab` ids
  above them. Keys and values are drawn with replacement; the last key occurred before. In training
  every next token is scored; for evaluation only the values of keys seen before.
  """

  identity_name = "Recall"  # as in the config.json of existing runs

  def __init__(self, *, vocab: int, length: int, noise: float = 0.0, noise_vocab: int = 0, **sets):
    """Args:
    vocab: Vocabulary size, including noise tokens.
    length: Length of the drawn sequence; the model's input lacks its last token.
    noise: Fraction of pairs that are replaced by two noise tokens.
    noise_vocab: Number of noise tokens.
    sets: Arguments of `SyntheticTask`.
    """
    if length % 2 or length < 4:
      raise ValueError(f"length is {length}, expected an even number of at least 4.")
    if not 0 <= noise < 1 or noise_vocab < (1 if noise else 0):
      raise ValueError(
        f"noise is {noise} and noise_vocab is {noise_vocab}, expected 0 <= noise < 1, and"
        " noise_vocab >= 1 if there is noise."
      )
    if vocab - noise_vocab < 2:
      raise ValueError(
        f"vocab is {vocab} with noise_vocab {noise_vocab}, expected at least 2 more."
      )
    super().__init__(vocab=vocab, length=length - 1, **sets)
    self._noise, self._noise_vocab = noise, noise_vocab

  def settings(self):
    return dict(
      vocab=self.vocab,
      length=self.shape[1] + 1,
      noise=self._noise,
      noise_vocab=self._noise_vocab,
    )

  def draw(self, random, examples, *, evaluation):
    pairs, tokens = (self.shape[1] + 1) // 2, self.vocab - self._noise_vocab
    n, example = tokens // 2, np.arange(examples)[:, None]
    noise = self._noise_pairs(random, examples, pairs)
    keys = random.integers(0, n, (examples, pairs))
    column = np.where(noise, n, keys)  # an extra column for noise
    seen = np.zeros((examples, n + 1), bool)
    seen[example, column[:, :-1]] = True
    keys[:, -1] = column[:, -1] = np.argmax(seen[:, :n] * random.random((examples, n)), axis=1)
    values = random.integers(n, tokens, (examples, n))[example, keys]
    drawn = np.stack([keys, values], axis=2)
    noise_tokens = random.integers(tokens, self.vocab, drawn.shape) if self._noise else drawn
    drawn = np.where(noise[..., None], noise_tokens, drawn).reshape(examples, -1)
    first, number = np.full((examples, n + 1), pairs), np.arange(pairs)[None]
    np.minimum.at(first, (example, column), number)
    known = (number > first[example, column]) & ~noise
    mask = np.stack([np.zeros_like(known), known], axis=2).reshape(examples, -1)
    return as_batch(drawn[:, :-1], drawn[:, 1:], mask[:, 1:] if evaluation else mask[:, 1:] | True)

  def _noise_pairs(self, random, examples, pairs):
    """Draw which pairs `[examples pairs]` are noise: never the last, and not one drawn pair."""
    noise = random.random((examples, pairs)) < self._noise
    noise[np.arange(examples), random.integers(0, pairs, examples)] = False
    noise[:, -1] = False
    # If the drawn pair was the last, all others may be noise: exclude one, as a key to query.
    all_noise = np.flatnonzero(noise[:, :-1].all(axis=1))
    noise[all_noise, random.integers(0, pairs - 1, len(all_noise))] = False
    return noise
