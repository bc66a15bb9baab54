"""Log-likelihoods from shared prefill states equal those of one forward pass."""

import numpy as np
import pytest

from deltanet_jax.eval.harness import ContinuationScorer
from deltanet_jax.eval.harness.scoring import bucket

MAX_LENGTH = 32


def draw(seed=0):
  """Return contexts of several lengths, up to more than the maximum, three continuations each."""
  rng = np.random.default_rng(seed)
  ids = lambda n: rng.integers(0, 256, n).tolist()
  contexts = [ids(n) for n in (1, 2, 9, 30, 40)]
  return [(context, ids(n)) for context in contexts for n in (1, 3, 9)]


def test_scores_are_those_of_one_forward_pass(model, direct):
  requests = draw()
  counted = []
  scores = ContinuationScorer(model, batch=8, max_length=MAX_LENGTH)(requests, counted.append)
  assert sum(counted) == len(requests)  # 15: the last batch is not full
  for score, request in zip(scores, requests):
    logprob, greedy = direct(*request, MAX_LENGTH)
    assert score.logprob == pytest.approx(logprob, abs=1e-5)
    assert score.greedy == greedy


def test_the_argmax_continuation_is_greedy(model, direct):
  context, found = [5, 6, 7], []
  for _ in range(3):
    candidates = [(context, [*found, token]) for token in range(260)]
    scores = ContinuationScorer(model, batch=260, max_length=MAX_LENGTH)(candidates)
    (best,) = [i for i, score in enumerate(scores) if score.greedy]
    found.append(best)
    assert scores[best].logprob == max(score.logprob for score in scores) or len(found) > 1
  assert direct(context, found, MAX_LENGTH)[1]


@pytest.mark.parametrize("batch,reuse", [(3, True), (8, False)])
def test_batch_size_and_reuse_do_not_change_scores(model, batch, reuse):
  requests = draw(1)
  expected = ContinuationScorer(model, batch=8, max_length=MAX_LENGTH)(requests)
  other = ContinuationScorer(model, batch=batch, max_length=MAX_LENGTH, reuse=reuse)(requests)
  assert [x.logprob for x in other] == pytest.approx([x.logprob for x in expected], abs=1e-5)
  assert [x.greedy for x in other] == [x.greedy for x in expected]


def test_invalid_requests_raise(model):
  scorer = ContinuationScorer(model, batch=2, max_length=8)
  with pytest.raises(ValueError, match="request 1 has 0 tokens of context and 1 of continuation"):
    scorer([([1], [2]), ([], [2])])
  with pytest.raises(
    ValueError, match="a continuation has 9 tokens, more than the maximum length 8"
  ):
    scorer([([1], [2] * 9)])


def test_buckets_are_powers_of_two():
  assert [bucket(n) for n in (0, 1, 8, 9, 16, 17, 2048)] == [0, 8, 8, 16, 16, 32, 2048]
