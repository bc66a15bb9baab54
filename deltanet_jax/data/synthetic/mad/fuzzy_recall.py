"""MAD task: fuzzy in-context recall, with keys and values of several tokens."""

import numpy as np

from deltanet_jax.data.synthetic.base import SyntheticTask, as_batch, distinct


class FuzzyRecall(SyntheticTask):
  """Key-value pairs; keys and values are motifs of 1 to `motif` distinct tokens in order.

  Keys are from the lower half of the ids, values from the upper one; the last id is padding on the
  left. The pair that is drawn first, the probe, appears at a random position and again at the end.
  In training every next token is scored. For evaluation all keys have `motif` tokens, and only
  values of keys seen before are scored.
  """

  def __init__(self, *, vocab: int, length: int, motif: int = 3, **sets):
    if motif < 1 or (vocab - 1) // 2 < motif:
      raise ValueError(
        f"vocab is {vocab} and motif is {motif}, expected motif >= 1 and (vocab - 1) // 2 >= motif."
      )
    if length <= 4 * motif:
      raise ValueError(
        f"length is {length}, expected more than {4 * motif} to fit the probe twice."
      )
    super().__init__(vocab=vocab, length=length, **sets)
    self._motif = motif

  def settings(self):
    return dict(vocab=self.vocab, length=self.shape[1], motif=self._motif)

  def draw(self, random, examples, *, evaluation):
    length, motif = self.shape[1], self._motif
    pairs = length // (motif + 1 if evaluation else 2)  # as many as fit if all are the shortest
    example, key_vocab = np.arange(examples)[:, None], (self.vocab - 1) // 2
    # Column 0 is the probe; the others are more pairs than needed.
    keys = distinct(random, key_vocab, (examples, 1 + pairs, motif))
    key_sizes = random.integers(motif if evaluation else 1, motif + 1, (examples, 1 + pairs))
    values = key_vocab + distinct(random, self.vocab - 1 - key_vocab, (examples, 1 + pairs, motif))
    value_sizes = random.integers(1, motif + 1, (examples, 1 + pairs))
    ids = _motif_ids(keys, key_sizes, key_vocab)
    # A key has the value of its first occurrence; the probe counts as first.
    first = _first(ids)
    values, value_sizes = values[example, first], value_sizes[example, first]
    sizes = key_sizes + value_sizes
    probe = sizes[:, :1]
    order, filled = self._order(random, sizes, first == 0)
    # Pairs until the sequence is full, then the probe. Unused pairs have the id -1.
    used = np.concatenate([filled < length - probe - 2 * motif, np.ones_like(probe, bool)], axis=1)
    order = np.concatenate([order, np.zeros_like(probe)], axis=1)
    ids = np.where(used, ids[example, order], -1)
    known = _first(ids) < np.arange(order.shape[1])
    sizes = np.where(used, sizes[example, order], 0)
    begin = length + 1 - sizes.sum(axis=1, keepdims=True) + np.cumsum(sizes, axis=1) - sizes
    drawn = np.full((examples, length + 1), self.vocab - 1)
    scored = np.zeros(drawn.shape, bool)
    key_sizes, value_sizes = key_sizes[example, order], value_sizes[example, order]
    for i in range(motif):
      at = np.nonzero(used & (i < key_sizes))
      drawn[at[0], begin[at] + i] = keys[at[0], order[at], i]
      at = np.nonzero(used & (i < value_sizes))
      position = begin[at] + key_sizes[at] + i
      drawn[at[0], position], scored[at[0], position] = values[at[0], order[at], i], known[at]
    mask = scored[:, 1:] if evaluation else np.ones((examples, length), bool)
    return as_batch(drawn[:, :-1], drawn[:, 1:], mask)

  def _order(self, random, sizes, is_probe):
    """Return the order of the columns, and the number of tokens before each.

    The probe is inserted as soon as a drawn number of tokens is reached, unless an earlier pair
    happens to have its key.
    """
    examples, pairs = len(sizes), sizes.shape[1] - 1
    others = np.cumsum(sizes[:, 1:], axis=1) - sizes[:, 1:]
    wanted = random.integers(0, self.shape[1] - 2 * sizes[:, 0])
    position = np.sum(others < wanted[:, None], axis=1)
    by_chance = np.where(is_probe[:, 1:].any(axis=1), np.argmax(is_probe[:, 1:], axis=1), pairs)
    position = np.where(by_chance < position, pairs, position)[:, None]
    columns = np.arange(pairs)[None]
    order = np.where(columns < position, columns + 1, np.where(columns == position, 0, columns))
    ordered = sizes[np.arange(examples)[:, None], order]
    return order, np.cumsum(ordered, axis=1) - ordered


def _motif_ids(keys: np.ndarray, sizes: np.ndarray, below: int) -> np.ndarray:
  """Return a unique number per motif: its tokens as digits, with an extra digit for no token."""
  digits = np.where(np.arange(keys.shape[-1]) < sizes[..., None], keys, below)
  return digits @ (below + 1) ** np.arange(keys.shape[-1])


def _first(ids: np.ndarray) -> np.ndarray:
  """Return, for each entry of `[b n]`, the column of its first occurrence in the row."""
  columns = ids.shape[1]
  keys = ids * len(ids) + np.arange(len(ids))[:, None]
  _, first, which = np.unique(keys, return_index=True, return_inverse=True)
  return first[which].reshape(ids.shape) % columns
