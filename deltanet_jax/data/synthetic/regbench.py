"""RegBench: strings of a regular language that every row has for itself."""

import math

import numpy as np

from deltanet_jax.data.synthetic.base import SyntheticTask, as_batch

PAD = 0  # letters are 1 to `alphabet`, the separator of strings comes after them
Range = tuple[int, int]  # from the first to the second, both included


class RegBench(SyntheticTask):
  """Strings of a random automaton, one automaton to a row, with a separator between them.

  From each state lead a few edges to different other states, each with another letter; a string
  begins in state 0 and follows edges that are equally likely. Next letters count, separators do
  not. Batches also have `accepted` [b L]: bit i says whether the automaton accepts token i next.
  """

  def __init__(
    self,
    *,
    batch: int,
    examples: int | None,
    seed: int = 0,
    length: int | None = None,
    shuffle: bool = False,
    validation_examples: int = 500,
    test_examples: int = 500,
    alphabet: int = 18,
    states: Range = (4, 12),
    letters: Range = (4, 18),
    edges: Range = (1, 3),
    strings: Range = (10, 19),
    string_length: Range = (1, 49),
  ):
    """Args:
    length: tokens of a row, the rest of longer ones is cut off; None has room for the longest.
    alphabet: letters there are; of them an automaton has some, the range `letters`.
    """
    named = dict(states=states, letters=letters, edges=edges, strings=strings)
    self._ranges = named | dict(string_length=string_length)
    for name, (low, high) in self._ranges.items():
      if not 1 <= low <= high:
        raise ValueError(f"{name} is ({low}, {high}), expected 1 or more, the smaller first.")
    if not edges[1] <= letters[0] <= letters[1] <= alphabet <= 29:
      raise ValueError(
        f"edges {edges}, letters {letters} and alphabet {alphabet} do not fit: an automaton needs"
        " a letter for each edge of a state, and the alphabet all letters, up to 29."
      )
    if edges[1] >= states[0]:
      raise ValueError(
        f"edges {edges} do not fit states {states}: they lead to different other states, so the"
        " smallest automaton has one less."
      )
    self._longest = strings[1] * (string_length[1] + 1) - 2  # the last token is only a target
    if length is not None and length < 1:
      raise ValueError(f"length is {length}, expected at least 1, or None.")
    super().__init__(
      vocab=alphabet + 2,
      length=self._longest if length is None else length,
      batch=batch,
      seed=seed,
      examples=examples,
      shuffle=shuffle,
      validation_examples=validation_examples,
      test_examples=test_examples,
    )
    self.alphabet, self.separator = alphabet, alphabet + 1

  def settings(self):
    return dict(alphabet=self.alphabet, length=self.shape[1], **self._ranges)

  def draw(self, random, rows, *, held_out):
    automata = self._automata(random, rows)
    counts = self._between(random, "strings", rows)
    row = np.repeat(np.arange(rows), counts)  # of each string
    sizes = self._between(random, "string_length", len(row))
    written, accepted = automata.walk(random, row, sizes.max())
    begin = np.cumsum(sizes + 1) - sizes - 1
    begin -= np.repeat(begin[np.cumsum(counts) - counts], counts)
    length = self.shape[1]
    tokens = np.full((rows, 1 + max(length, self._longest)), PAD, np.int32)
    bits = np.zeros(tokens.shape, np.int32)
    string, letter = np.nonzero(np.arange(sizes.max()) < sizes[:, None])
    at = row[string], begin[string] + letter
    tokens[at], bits[at] = written[letter, string], accepted[letter, string]
    inner = np.append(row[1:] == row[:-1], False)  # strings that are not the last of their row
    tokens[row[inner], (begin + sizes)[inner]] = self.separator
    inputs, targets = tokens[:, :length], tokens[:, 1 : length + 1]
    return as_batch(
      np.where(targets == PAD, PAD, inputs),  # the last token is only a target
      targets,
      (targets != PAD) & (targets != self.separator),
      accepted=bits[:, 1 : length + 1],
    )

  def _between(self, random, name, n):
    low, high = self._ranges[name]
    return random.integers(low, high + 1, n)

  def _automata(self, random, rows) -> "_Automata":
    states, edges = self._ranges["states"][1], self._ranges["edges"][1]
    exist = np.arange(states) < self._between(random, "states", rows)[:, None]
    others = exist[:, None] & ~np.eye(states, dtype=bool)
    ranks = np.argsort(random.random((rows, self.alphabet)), axis=1)
    own = ranks < self._between(random, "letters", rows)[:, None]
    own = np.broadcast_to(own[:, None], (rows, states, self.alphabet))
    return _Automata(
      letters=1 + _some(random, own, edges).reshape(-1, edges),
      targets=_some(random, others, edges).reshape(-1, edges),
      edges=self._between(random, "edges", rows * states),
      states=states,
    )


class _Automata:
  """One to a row; state s of row r is number r * states + s."""

  def __init__(self, letters, targets, edges, states):
    self._states = states
    there = np.arange(letters.shape[1]) < edges[:, None]
    self.accepted = np.sum(np.where(there, 1 << letters, 0), axis=1)
    # A number of choices that any number of edges divides, so that one draw serves all states.
    self.choices = math.lcm(*range(1, letters.shape[1] + 1))
    taken = np.arange(self.choices) % edges[:, None]
    first = np.arange(len(edges))[:, None] // states * states
    self.letters = np.take_along_axis(letters, taken, axis=1).ravel()
    self.targets = np.take_along_axis(first + targets, taken, axis=1).ravel()

  def walk(self, random, row, steps) -> tuple[np.ndarray, np.ndarray]:
    """`[steps strings]`: letters from state 0 on, and which would have been accepted, as bits."""
    state, choice = row * self._states, random.integers(0, self.choices, (steps, len(row)))
    letters, visited = np.empty_like(choice), np.empty_like(choice)
    for i in range(steps):
      visited[i], edge = state, state * self.choices + choice[i]
      letters[i], state = self.letters[edge], self.targets[edge]
    return letters, self.accepted[visited]


def _some(random: np.random.Generator, allowed: np.ndarray, n: int) -> np.ndarray:
  """`[.. n]`: places of different allowed ones, each choice equally likely."""
  return np.argsort(np.where(allowed, random.random(allowed.shape), 2), axis=-1)[..., :n]
