"""Associative recall in natural text: facts planted in the text and queried at its end.

A sequence is validation text with facts " Kadom is belur." at even distances, then all facts once
more in another order, as queries. The letters of the queried values are the targets: they can be
predicted only from the context. As a control, facts can be planted with other values than those
queried.
"""

from collections.abc import Iterator

import numpy as np

from deltanet_jax.data.corpus.shards import Split
from deltanet_jax.data.corpus.tokenizer import Tokenizer
from deltanet_jax.data.task import Batch, ValidationSource, sequences_per_host

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_WORD = (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS)


def words(rng: np.random.Generator, count: int) -> list[str]:
  """Draw distinct pronounceable nonsense words of five letters."""
  found: dict[str, None] = {}
  while len(found) < count:
    found["".join(letters[rng.integers(len(letters))] for letters in _WORD)] = None
  return list(found)


class PlantedRecallText(ValidationSource):
  """Batches of sequences with `pairs` facts (name and value) each, deterministic in the seed."""

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
    plant_answers: bool = True,
  ):
    """Args:
    split: Text in which facts are planted.
    tokenizer: Of the split.
    length: Sequence length.
    batch: Global batch size.
    batches: Number of batches.
    pairs: Facts per sequence.
    seed: Of names, values and text positions.
    plant_answers: False plants other values than those queried, as a control.
    """
    self._split, self._tokenizer, self._length, self._batch = split, tokenizer, length, batch
    self._batches, self._pairs, self._seed = batches, pairs, seed
    self._plant_answers = plant_answers
    self._sequence(0)  # raises if the sequence is too short

  def _sentence(self, name: str, value: str) -> tuple[np.ndarray, int]:
    """Return the token ids of a fact, and the index where its value starts."""
    before = self._tokenizer.encode(f" {name.capitalize()} is")
    full = self._tokenizer.encode(f" {name.capitalize()} is {value}.")
    return full, len(before)

  def validation(self, host: int, hosts: int) -> Iterator[Batch]:
    count = sequences_per_host(self._batch, host, hosts)
    for number in range(self._batches):
      start = number * self._batch + host * count
      sequences = [self._sequence(i) for i in range(start, start + count)]
      tokens, is_answer = (np.stack(x) for x in zip(*sequences))
      yield {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.zeros((count, self._length), np.int32),
        "mask": is_answer[:, 1:],
      }

  def _sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `length` + 1 tokens, and which of them are values of queries."""
    rng = np.random.default_rng((self._seed, index))
    found = words(rng, 3 * self._pairs)
    names, values, others = (found[i::3] for i in range(3))
    planted = values if self._plant_answers else others
    facts = [self._sentence(name, value)[0] for name, value in zip(names, planted)]
    queries = [self._sentence(names[i], values[i]) for i in rng.permutation(self._pairs)]
    used = sum(len(x) for x in facts) + sum(len(x) for x, _ in queries) + 1
    left = self._length + 1 - used
    if left < self._pairs or self._split.tokens <= left:
      raise ValueError(
        f"sequences of {self._length} tokens of a text of {self._split.tokens} are too short for"
        f" {self._pairs} facts and queries: use longer sequences or more text."
      )
    text = self._text(rng, left)
    cuts = np.linspace(0, len(text), self._pairs + 1).astype(int)[:-1]
    parts = [np.asarray([self._tokenizer.bos])]
    for first, last, fact in zip(cuts, (*cuts[1:], len(text)), facts):
      parts += [fact, text[first:last]]
    marks = [np.zeros(sum(map(len, parts)), bool)]
    for sentence, start in queries:
      parts.append(sentence)
      # The full stop does not belong to the value.
      position = np.arange(len(sentence))
      marks.append((position > start) & (position < len(sentence) - 1))
    return np.concatenate(parts).astype(np.int32), np.concatenate(marks)

  def _text(self, rng: np.random.Generator, size: int) -> np.ndarray:
    start = int(rng.integers(self._split.tokens - size))
    return np.asarray(self._split.read(start, start + size)[0])
