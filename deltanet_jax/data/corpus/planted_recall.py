"""Associative recall in running text: names and values planted in it, and asked for at its end.

A row is held-out text with sentences " Kadom is belur." spread over it, then all of them once more
in another order. The letters of the values there are the targets: nothing but the context tells
them. Rows whose sentences were told with other values show what a model guesses without it.
"""

from collections.abc import Iterator

import numpy as np

from deltanet_jax.data.corpus.shards import Split
from deltanet_jax.data.corpus.tokenizer import Tokenizer
from deltanet_jax.data.task import Batch, ValidationSource, sequences_per_host

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_WORD = (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS)


def words(rng: np.random.Generator, count: int) -> list[str]:
  """Different words of five letters that can be spoken and mean nothing."""
  found: dict[str, None] = {}
  while len(found) < count:
    found["".join(letters[rng.integers(len(letters))] for letters in _WORD)] = None
  return list(found)


class PlantedRecallText(ValidationSource):
  """Batches of rows with `pairs` names and values each, a function of the seed."""

  def __init__(
    self,
    split: Split,
    tokenizer: Tokenizer,
    *,
    length: int,
    batch: int,
    batches: int = 8,
    pairs: int = 4,
    seed: int = 0,
    told: bool = True,
  ):
    """Args:
    told: False plants other values than those that are asked for.
    """
    self._split, self._tokenizer, self._length, self._batch = split, tokenizer, length, batch
    self._batches, self._pairs, self._seed, self._told = batches, pairs, seed, told
    self._row(0)  # finds out whether there is room

  def _ids(self, name: str, value: str) -> tuple[np.ndarray, int]:
    """The sentence of a pair, and where its value begins."""
    before = self._tokenizer.encode(f" {name.capitalize()} is")
    whole = self._tokenizer.encode(f" {name.capitalize()} is {value}.")
    return whole, len(before)

  def validation(self, host: int, hosts: int) -> Iterator[Batch]:
    rows = sequences_per_host(self._batch, host, hosts)
    for number in range(self._batches):
      start = number * self._batch + host * rows
      made = [self._row(row) for row in range(start, start + rows)]
      tokens, asked = (np.stack(x) for x in zip(*made))
      yield {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.zeros((rows, self._length), np.int32),
        "mask": asked[:, 1:],
      }

  def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of one row, one more than it has inputs, and which of them are asked for."""
    rng = _rng(self._seed, row)
    found = words(rng, 3 * self._pairs)
    names, values, others = (found[i::3] for i in range(3))
    planted = values if self._told else others
    facts = [self._ids(name, value)[0] for name, value in zip(names, planted)]
    asked = [self._ids(names[i], values[i]) for i in rng.permutation(self._pairs)]
    used = sum(len(x) for x in facts) + sum(len(x) for x, _ in asked) + 1
    room = self._length + 1 - used
    if room < self._pairs or self._split.tokens <= room:
      raise ValueError(
        f"rows of {self._length} tokens of a text of {self._split.tokens} have no room for"
        f" {self._pairs} names and values told and asked: take longer rows or more text."
      )
    text = self._text(rng, room)
    cuts = np.linspace(0, len(text), self._pairs + 1).astype(int)[:-1]
    parts = [np.asarray([self._tokenizer.bos])]
    for first, last, fact in zip(cuts, (*cuts[1:], len(text)), facts):
      parts += [fact, text[first:last]]
    marks = [np.zeros(sum(map(len, parts)), bool)]
    for sentence, begin in asked:
      parts.append(sentence)
      # The full stop is no part of the value.
      place = np.arange(len(sentence))
      marks.append((place > begin) & (place < len(sentence) - 1))
    return np.concatenate(parts).astype(np.int32), np.concatenate(marks)

  def _text(self, rng: np.random.Generator, size: int) -> np.ndarray:
    start = int(rng.integers(self._split.tokens - size))
    return np.asarray(self._split.read(start, start + size)[0])


def _rng(*seed: int) -> np.random.Generator:
  return np.random.default_rng(seed)
