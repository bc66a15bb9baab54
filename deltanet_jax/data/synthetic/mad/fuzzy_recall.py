"""MAD's fuzzy in-context recall: keys and values of several tokens."""

import numpy as np

from deltanet_jax.data.synthetic.base import SyntheticTask, as_batch, distinct


class FuzzyRecall(SyntheticTask):
  """Pairs of a key and its value, each a motif of 1 to `motif` different tokens in order.

  Keys are of the lower half of the ids, values of the upper one, the last id fills rows from the
  left. A pair that is drawn first, the probe, stands somewhere in the row and once more at its end.
  In training every next token counts. Held-out keys have the full `motif` of tokens, and what
  counts are the values of keys that were shown before.
  """

  def __init__(self, *, vocab: int, length: int, motif: int = 3, **sets):
    if motif < 1 or (vocab - 1) // 2 < motif:
      raise ValueError(
        f"vocab is {vocab} for motifs of up to {motif}, expected at least 1 and so many different"
        " keys: half of the ids without one."
      )
    if length <= 4 * motif:
      raise ValueError(
        f"length is {length}, expected more than {4 * motif}, for the probe to stand there twice."
      )
    super().__init__(vocab=vocab, length=length, **sets)
    self._motif = motif

  def settings(self):
    return dict(vocab=self.vocab, length=self.shape[1], motif=self._motif)

  def draw(self, random, rows, *, held_out):
    length, motif = self.shape[1], self._motif
    pairs = length // (motif + 1 if held_out else 2)  # as many of the shortest as fit
    row, of_keys = np.arange(rows)[:, None], (self.vocab - 1) // 2
    # Column 0 is the probe, then come the others, more than will be needed.
    keys = distinct(random, of_keys, (rows, 1 + pairs, motif))
    key_sizes = random.integers(motif if held_out else 1, motif + 1, (rows, 1 + pairs))
    values = of_keys + distinct(random, self.vocab - 1 - of_keys, (rows, 1 + pairs, motif))
    value_sizes = random.integers(1, motif + 1, (rows, 1 + pairs))
    names = _names(keys, key_sizes, of_keys)
    # A key has the value that was drawn with its first use, that of the probe before all others.
    first = _first(names)
    values, value_sizes = values[row, first], value_sizes[row, first]
    sizes = key_sizes + value_sizes
    probe = sizes[:, :1]
    order, filled = self._order(random, sizes, first == 0)
    # Pairs until too little is left, and the probe. One that is left out has no name.
    used = np.concatenate([filled < length - probe - 2 * motif, np.ones_like(probe, bool)], axis=1)
    order = np.concatenate([order, np.zeros_like(probe)], axis=1)
    names = np.where(used, names[row, order], -1)
    known = _first(names) < np.arange(order.shape[1])
    sizes = np.where(used, sizes[row, order], 0)
    begin = length + 1 - sizes.sum(axis=1, keepdims=True) + np.cumsum(sizes, axis=1) - sizes
    drawn = np.full((rows, length + 1), self.vocab - 1)
    scored = np.zeros(drawn.shape, bool)
    key_sizes, value_sizes = key_sizes[row, order], value_sizes[row, order]
    for i in range(motif):
      at = np.nonzero(used & (i < key_sizes))
      drawn[at[0], begin[at] + i] = keys[at[0], order[at], i]
      at = np.nonzero(used & (i < value_sizes))
      place = begin[at] + key_sizes[at] + i
      drawn[at[0], place], scored[at[0], place] = values[at[0], order[at], i], known[at]
    mask = scored[:, 1:] if held_out else np.ones((rows, length), bool)
    return as_batch(drawn[:, :-1], drawn[:, 1:], mask)

  def _order(self, random, sizes, is_probe):
    """Which column of a row comes at each place of it, and how many tokens come before.

    The probe goes in as soon as a drawn number of tokens is reached, unless a pair before happens
    to have its key.
    """
    rows, pairs = len(sizes), sizes.shape[1] - 1
    others = np.cumsum(sizes[:, 1:], axis=1) - sizes[:, 1:]
    wanted = random.integers(0, self.shape[1] - 2 * sizes[:, 0])
    place = np.sum(others < wanted[:, None], axis=1)
    by_chance = np.where(is_probe[:, 1:].any(axis=1), np.argmax(is_probe[:, 1:], axis=1), pairs)
    place = np.where(by_chance < place, pairs, place)[:, None]
    columns = np.arange(pairs)[None]
    order = np.where(columns < place, columns + 1, np.where(columns == place, 0, columns))
    ordered = sizes[np.arange(rows)[:, None], order]
    return order, np.cumsum(ordered, axis=1) - ordered


def _names(keys: np.ndarray, sizes: np.ndarray, below: int) -> np.ndarray:
  """A number for each motif: its tokens as digits, with one more digit for none."""
  digits = np.where(np.arange(keys.shape[-1]) < sizes[..., None], keys, below)
  return digits @ (below + 1) ** np.arange(keys.shape[-1])


def _first(names: np.ndarray) -> np.ndarray:
  """In every row `[b n]`, the column where a name stands first."""
  columns = names.shape[1]
  keys = names * len(names) + np.arange(len(names))[:, None]
  _, first, which = np.unique(keys, return_index=True, return_inverse=True)
  return first[which].reshape(names.shape) % columns
