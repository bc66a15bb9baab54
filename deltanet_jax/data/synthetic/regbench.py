"""RegBench: in-context learning of a random regular language per example (Akyurek et al. 2024)."""

import math

import numpy as np

from deltanet_jax.data.synthetic.base import SyntheticTask, as_batch

PAD = 0  # letters are 1 to `alphabet`, the separator is `alphabet` + 1
Range = tuple[int, int]  # inclusive bounds


class RegBench(SyntheticTask):
  """Strings of a random automaton, one automaton per example, joined by separators.

  Each state has a few outgoing edges to distinct other states, with distinct letters. A string
  starts in state 0 and follows edges uniformly. Letters are scored targets, separators are not.
  Batches also have `accepted` [b L]: bit i is set if the automaton accepts token i next.
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
    batch: Global batch size.
    examples: Size of the training set; None draws fresh examples for every batch.
    seed: Of all examples.
    length: Sequence length, at which longer examples are truncated; None fits the longest.
    shuffle: Whether to reshuffle a fixed set in every epoch.
    validation_examples: Size of the validation set.
    test_examples: Size of the test set.
    alphabet: Number of letters.
    states: Range of the number of states of an automaton.
    letters: Range of the number of letters that an automaton uses.
    edges: Range of the number of outgoing edges of a state.
    strings: Range of the number of strings of an example.
    string_length: Range of the length of a string.
    """
    named = dict(states=states, letters=letters, edges=edges, strings=strings)
    self._ranges = named | dict(string_length=string_length)
    for name, (low, high) in self._ranges.items():
      if not 1 <= low <= high:
        raise ValueError(f"{name} is ({low}, {high}), expected (low, high) with 1 <= low <= high.")
    if not edges[1] <= letters[0] <= letters[1] <= alphabet <= 29:
      raise ValueError(
        f"edges {edges}, letters {letters} and alphabet {alphabet} are inconsistent, expected"
        " max(edges) <= min(letters) <= max(letters) <= alphabet <= 29."
      )
    if edges[1] >= states[0]:
      raise ValueError(
        f"edges {edges} and states {states} are inconsistent, expected max(edges) < min(states):"
        " edges lead to distinct other states."
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

  def draw(self, random, examples, *, evaluation):
    automata = self._automata(random, examples)
    counts = self._between(random, "strings", examples)
    example = np.repeat(np.arange(examples), counts)  # example of each string
    sizes = self._between(random, "string_length", len(example))
    written, accepted = automata.walk(random, example, sizes.max())
    begin = np.cumsum(sizes + 1) - sizes - 1
    begin -= np.repeat(begin[np.cumsum(counts) - counts], counts)
    length = self.shape[1]
    tokens = np.full((examples, 1 + max(length, self._longest)), PAD, np.int32)
    bits = np.zeros(tokens.shape, np.int32)
    string, letter = np.nonzero(np.arange(sizes.max()) < sizes[:, None])
    at = example[string], begin[string] + letter
    tokens[at], bits[at] = written[letter, string], accepted[letter, string]
    inner = np.append(example[1:] == example[:-1], False)  # all strings but an example's last
    tokens[example[inner], (begin + sizes)[inner]] = self.separator
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

  def _automata(self, random, examples) -> "_Automata":
    states, edges = self._ranges["states"][1], self._ranges["edges"][1]
    exist = np.arange(states) < self._between(random, "states", examples)[:, None]
    others = exist[:, None] & ~np.eye(states, dtype=bool)
    ranks = np.argsort(random.random((examples, self.alphabet)), axis=1)
    own = ranks < self._between(random, "letters", examples)[:, None]
    own = np.broadcast_to(own[:, None], (examples, states, self.alphabet))
    return _Automata(
      letters=1 + _some(random, own, edges).reshape(-1, edges),
      targets=_some(random, others, edges).reshape(-1, edges),
      edges=self._between(random, "edges", examples * states),
      states=states,
    )


class _Automata:
  """One automaton per example; state s of example r has index r * states + s."""

  def __init__(self, letters, targets, edges, states):
    self._states = states
    exists = np.arange(letters.shape[1]) < edges[:, None]
    self.accepted = np.sum(np.where(exists, 1 << letters, 0), axis=1)
    # A multiple of every number of edges, so that one uniform draw serves all states.
    self.choices = math.lcm(*range(1, letters.shape[1] + 1))
    taken = np.arange(self.choices) % edges[:, None]
    first = np.arange(len(edges))[:, None] // states * states
    self.letters = np.take_along_axis(letters, taken, axis=1).ravel()
    self.targets = np.take_along_axis(first + targets, taken, axis=1).ravel()

  def walk(self, random, example, steps) -> tuple[np.ndarray, np.ndarray]:
    """Walk from state 0; return the letters `[steps strings]`, and the accepted ones as bits."""
    state, choice = example * self._states, random.integers(0, self.choices, (steps, len(example)))
    letters, visited = np.empty_like(choice), np.empty_like(choice)
    for i in range(steps):
      visited[i], edge = state, state * self.choices + choice[i]
      letters[i], state = self.letters[edge], self.targets[edge]
    return letters, self.accepted[visited]


def _some(random: np.random.Generator, allowed: np.ndarray, n: int) -> np.ndarray:
  """Draw indices `[.. n]` of distinct allowed entries, uniformly."""
  return np.argsort(np.where(allowed, random.random(allowed.shape), 2), axis=-1)[..., :n]
