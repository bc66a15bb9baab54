"""Log-likelihoods of continuations: a context is read once, its state serves all that follow it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.generate.loop import left_pad
from deltanet_jax.models import LM
from deltanet_jax.models.chunked_logits import target_logprobs

_LEAST = 8  # tokens; the shortest bucket
Tokens = tuple[int, ...]


def bucket(length: int) -> int:
  """The padded length of so many tokens, a power of two: each length compiles a program."""
  return 0 if length == 0 else max(1 << (length - 1).bit_length(), _LEAST)


@dataclasses.dataclass(frozen=True)
class Score:
  logprob: float  # of all tokens of the continuation
  greedy: bool  # whether each of them is the predict


@dataclasses.dataclass(frozen=True)
class _Tail:
  """What follows a prefix: inputs, and the token that is to be predicted from each."""

  number: int  # of the request
  inputs: Tokens
  targets: Tokens


@dataclasses.dataclass(frozen=True)
class _Group:
  """A prefix and all that follows it."""

  prefix: Tokens
  tails: list[_Tail]

  @property
  def sizes(self) -> tuple[int, int]:
    """Padded lengths of the prefix and of its longest tail."""
    return bucket(len(self.prefix)), bucket(max(len(tail.inputs) for tail in self.tails))


class ContinuationScorer:
  """Scores continuations with one model on one device.

  The last token of a context is read again before every continuation, since it predicts the first
  token of it; all before it, the prefix, is read once for all requests that share it.
  """

  def __init__(self, model: LM, *, batch: int, max_length: int, reuse: bool = True):
    """Args:
    batch: rows at a time.
    max_length: tokens that the model is given at most: the last ones of what is longer.
    reuse: False reads a context anew for each request, to measure what reuse gains.
    """
    self._model, self._batch, self._max_length, self._reuse = model, batch, max_length, reuse

  def __call__(
    self,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    progress: Callable[[int], None] = lambda count: None,
  ) -> list[Score]:
    """Scores of (context, continuation), both token ids; `progress` is told of so many more."""
    scores: dict[int, Score] = {}
    for groups in self._batches(self._group(requests)):
      for tails, state in self._read(groups):
        scores |= self._follow(state, tails)
        progress(len(tails))
    return [scores[number] for number in range(len(requests))]

  def _group(self, requests) -> list[_Group]:
    found: dict[tuple, list[_Tail]] = {}
    for number, (context, continuation) in enumerate(requests):
      size = len(continuation)
      if not len(context) or not size:
        raise ValueError(
          f"request {number} has {len(context)} tokens of context and {size} of continuation,"
          " expected at least one of each: an empty context is bos."
        )
      if size > self._max_length:
        raise ValueError(
          f"a continuation has {size} tokens, more than the {self._max_length} that the model is"
          " given: set a larger length."
        )
      tokens = (*context, *continuation)[-(self._max_length + 1) :]
      tail = _Tail(number, tokens[-size - 1 : -1], tokens[-size:])
      own = None if self._reuse else number
      found.setdefault((own, tokens[: -size - 1]), []).append(tail)
    return [_Group(prefix, tails) for (_, prefix), tails in found.items()]

  def _batches(self, groups: list[_Group]) -> Iterator[list[_Group]]:
    """The longest first, so that memory is known early and only the last batch is not full."""
    groups = sorted(groups, key=lambda group: group.sizes, reverse=True)
    # Without a prefix there is no state to read: those are not mixed with others.
    for some in ([x for x in groups if x.prefix], [x for x in groups if not x.prefix]):
      for start in range(0, len(some), self._batch):
        yield some[start : start + self._batch]

  def _read(self, groups: list[_Group]) -> Iterator[tuple[list[tuple[int, _Tail]], object]]:
    """Batches of tails, each with the row of its prefix, and the state of all prefixes."""
    length = max(group.sizes[0] for group in groups)
    room = max(group.sizes[1] for group in groups)
    state = self._model.init_state(self._batch, length + room)
    if length:
      prefixes = [group.prefix for group in groups]
      prefixes += [(0,)] * (self._batch - len(prefixes))
      state = _read(self._model, *left_pad(prefixes, length), state)
    tails = [(row, tail) for row, group in enumerate(groups) for tail in group.tails]
    tails.sort(key=lambda one: len(one[1].inputs), reverse=True)
    for start in range(0, len(tails), self._batch):
      yield tails[start : start + self._batch], state

  def _follow(self, state, tails: list[tuple[int, _Tail]]) -> dict[int, Score]:
    """Number of a request -> its score."""
    size = bucket(max(len(tail.inputs) for _, tail in tails))
    inputs, targets = np.zeros((2, self._batch, size), np.int32)
    rows = np.zeros(self._batch, np.int32)
    for i, (row, tail) in enumerate(tails):
      rows[i], n = row, len(tail.inputs)
      inputs[i, :n], targets[i, :n] = tail.inputs, tail.targets
    logprobs, predict = map(np.asarray, _follow(self._model, state, rows, inputs, targets))
    scores = {}
    for i, (_, tail) in enumerate(tails):
      n = len(tail.inputs)
      greedy = bool((predict[i, :n] == targets[i, :n]).all())
      scores[tail.number] = Score(math.fsum(logprobs[i, :n].tolist()), greedy)
    return scores


@functools.partial(jax.jit, donate_argnames="state")
def _read(model, tokens, segment_ids, state):
  """The state after the tokens of each row."""
  return model.features(tokens, segment_ids, state)[1]


@jax.jit
def _follow(model, state, rows, inputs, targets):
  """Of each target its log p and what is predict instead, going on from the states of `rows`.

  A row is padded at its end, where it changes nothing before.
  """
  x, _ = model.features(inputs, None, take_rows(model, state, rows))
  return target_logprobs(model, x, targets)


def take_rows(model: LM, state, rows):
  """The decode state of these rows, as often as they are named."""
  init = lambda count: jax.eval_shape(lambda model: model.init_state(count, 1), model)

  def take(x, one, two):
    # Rows lie along the axis that grows with their number; some entries are the same for all.
    axes = [i for i, (a, b) in enumerate(zip(one.shape, two.shape)) if a != b]
    return jnp.take(x, rows, axis=axes[0]) if axes else x

  return jax.tree.map(take, state, init(1), init(2))
