"""Log-likelihoods of continuations; requests with the same context share its prefill state."""

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

_MIN_BUCKET = 8  # tokens
Tokens = tuple[int, ...]


def bucket(length: int) -> int:
  """Return a length padded to a power of two, because each length is compiled."""
  return 0 if length == 0 else max(1 << (length - 1).bit_length(), _MIN_BUCKET)


@dataclasses.dataclass(frozen=True)
class Score:
  """Score of one continuation."""

  logprob: float  # sum over the tokens of the continuation
  greedy: bool  # whether every token is the argmax


@dataclasses.dataclass(frozen=True)
class _Tail:
  """What follows a prefix: input tokens, and the target of each."""

  index: int  # of the request
  inputs: Tokens
  targets: Tokens


@dataclasses.dataclass(frozen=True)
class _Group:
  """A prefix and all tails that share it."""

  prefix: Tokens
  tails: list[_Tail]

  @property
  def sizes(self) -> tuple[int, int]:
    """Return the padded lengths of the prefix and of its longest tail."""
    return bucket(len(self.prefix)), bucket(max(len(tail.inputs) for tail in self.tails))


class ContinuationScorer:
  """Score continuations with one model on one device.

  The last token of a context belongs to the tail, because it predicts the first token of the
  continuation. The tokens before it, the prefix, are prefilled once for all requests that share
  them.
  """

  def __init__(self, model: LM, *, batch: int, max_length: int, reuse: bool = True):
    """Initialize.

    Args:
      batch: batch size.
      max_length: maximum sequence length; longer sequences are truncated on the left.
      reuse: False prefills every request separately, to measure what sharing gains.
    """
    self._model, self._batch, self._max_length, self._reuse = model, batch, max_length, reuse

  def __call__(
    self,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    progress: Callable[[int], None] = lambda count: None,
  ) -> list[Score]:
    """Return the scores of (context, continuation) token ids.

    Args:
      progress: called with the number of requests just scored.
    """
    scores: dict[int, Score] = {}
    for groups in self._batches(self._group(requests)):
      for tails, state in self._prefill(groups):
        scores |= self._score(state, tails)
        progress(len(tails))
    return [scores[index] for index in range(len(requests))]

  def _group(self, requests) -> list[_Group]:
    found: dict[tuple, list[_Tail]] = {}
    for index, (context, continuation) in enumerate(requests):
      size = len(continuation)
      if not len(context) or not size:
        raise ValueError(
          f"request {index} has {len(context)} tokens of context and {size} of continuation,"
          " expected at least one of each: use bos as an empty context."
        )
      if size > self._max_length:
        raise ValueError(
          f"a continuation has {size} tokens, more than the maximum length {self._max_length}: set"
          " a larger length."
        )
      tokens = (*context, *continuation)[-(self._max_length + 1) :]
      tail = _Tail(index, tokens[-size - 1 : -1], tokens[-size:])
      group = None if self._reuse else index
      found.setdefault((group, tokens[: -size - 1]), []).append(tail)
    return [_Group(prefix, tails) for (_, prefix), tails in found.items()]

  def _batches(self, groups: list[_Group]) -> Iterator[list[_Group]]:
    """Yield batches, longest first: the largest memory is needed first."""
    groups = sorted(groups, key=lambda group: group.sizes, reverse=True)
    # Groups without a prefix need no prefill, so they get batches of their own.
    for some in ([x for x in groups if x.prefix], [x for x in groups if not x.prefix]):
      for start in range(0, len(some), self._batch):
        yield some[start : start + self._batch]

  def _prefill(self, groups: list[_Group]) -> Iterator[tuple[list[tuple[int, _Tail]], object]]:
    """Yield batches of tails, each with its prefix's index in the state, and that state."""
    length = max(group.sizes[0] for group in groups)
    tail_length = max(group.sizes[1] for group in groups)
    state = self._model.init_state(self._batch, length + tail_length)
    if length:
      prefixes = [group.prefix for group in groups]
      prefixes += [(0,)] * (self._batch - len(prefixes))
      state = _prefill(self._model, *left_pad(prefixes, length), state)
    tails = [(i, tail) for i, group in enumerate(groups) for tail in group.tails]
    tails.sort(key=lambda one: len(one[1].inputs), reverse=True)
    for start in range(0, len(tails), self._batch):
      yield tails[start : start + self._batch], state

  def _score(self, state, tails: list[tuple[int, _Tail]]) -> dict[int, Score]:
    """Return scores by request index."""
    size = bucket(max(len(tail.inputs) for _, tail in tails))
    inputs, targets = np.zeros((2, self._batch, size), np.int32)
    prefixes = np.zeros(self._batch, np.int32)
    for i, (prefix, tail) in enumerate(tails):
      prefixes[i], n = prefix, len(tail.inputs)
      inputs[i, :n], targets[i, :n] = tail.inputs, tail.targets
    scored = _score_tails(self._model, state, prefixes, inputs, targets)
    logprobs, argmax = map(np.asarray, scored)
    scores = {}
    for i, (_, tail) in enumerate(tails):
      n = len(tail.inputs)
      greedy = bool((argmax[i, :n] == targets[i, :n]).all())
      scores[tail.index] = Score(math.fsum(logprobs[i, :n].tolist()), greedy)
    return scores


@functools.partial(jax.jit, donate_argnames="state")
def _prefill(model, tokens, segment_ids, state):
  """Return the state after the tokens of each sequence."""
  return model.features(tokens, segment_ids, state)[1]


@jax.jit
def _score_tails(model, state, prefixes, inputs, targets):
  """Return log p of each target and the argmax there, continuing the states of `prefixes`.

  Tails are padded on the right, which changes nothing before the padding.
  """
  x, _ = model.features(inputs, None, gather_state(model, state, prefixes))
  return target_logprobs(model, x, targets)


def gather_state(model: LM, state, indices):
  """Gather a decode state along its batch axis; indices may repeat."""
  init = lambda count: jax.eval_shape(lambda model: model.init_state(count, 1), model)

  def take(x, one, two):
    # The batch axis is the one whose size differs; entries without it are shared.
    axes = [i for i, (a, b) in enumerate(zip(one.shape, two.shape)) if a != b]
    return jnp.take(x, indices, axis=axes[0]) if axes else x

  return jax.tree.map(take, state, init(1), init(2))
