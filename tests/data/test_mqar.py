"""MQAR: the pairs answer every query, query positions follow a power law, answers do not leak."""

import numpy as np
import pytest

from deltanet_jax.data import MQAR

K, T, V, EXAMPLES = 8, 64, 256, 3000


@pytest.fixture(scope="module")
def batch():
  return MQAR(V, T, K, batch=EXAMPLES, seed=1).batch(0, 0, 1)


def test_a_dictionary_of_the_pairs_answers_everything(batch):
  for tokens, targets, mask in zip(*(batch[x][:300] for x in ("tokens", "targets", "mask"))):
    known = dict(zip(tokens[0 : 2 * K : 2], tokens[1 : 2 * K : 2]))
    assert len(known) == K == len(set(known.values())) == mask.sum()
    assert [known[token] for token in tokens[mask]] == targets[mask].tolist()


def test_keys_values_queries_and_zeros(batch):
  tokens, mask = batch["tokens"], batch["mask"]
  keys, values, after = tokens[:, 0 : 2 * K : 2], tokens[:, 1 : 2 * K : 2], tokens[:, 2 * K :]
  assert keys.min() == 1 and keys.max() == V // 2 - 1
  assert values.min() == V // 2 and values.max() == V - 1
  assert not mask[:, : 2 * K].any() and not mask[:, 1::2].any()
  # After the pairs each key once, otherwise zeros: no value, hence no answer, appears there.
  assert np.array_equal(np.sort(after[mask[:, 2 * K :]].reshape(-1, K)), np.sort(keys))
  assert (after[~mask[:, 2 * K :]] == 0).all()
  counts = np.bincount(keys.ravel(), minlength=V // 2)[1:]
  assert abs(counts / counts.mean() - 1).max() < 5 / np.sqrt(counts.mean())


def test_query_slots_are_drawn_by_weight(batch):
  """Against sequential sampling, and for the first query against the formula."""
  slots, power = (T - 2 * K) // 2, 0.01
  weights = np.arange(1, slots + 1) ** (power - 1)
  queried = batch["mask"][:, 2 * K :: 2]
  first_key = np.argmax(batch["tokens"][:, 2 * K :: 2] == batch["tokens"][:, :1], axis=1)
  share = np.bincount(first_key, minlength=slots) / EXAMPLES
  expected = weights / weights.sum()
  assert abs(share - expected).max() < 5 * np.sqrt(0.25 / EXAMPLES)
  random, plain = np.random.default_rng(0), np.zeros(slots)
  for _ in range(1000):
    plain[random.choice(slots, K, replace=False, p=expected)] += 1 / 1000
  assert abs(queried.mean(axis=0) - plain).max() < 5 * np.sqrt(0.25 / 1000)
  uniform = MQAR(V, T, K, batch=EXAMPLES, power=1.0).batch(0, 0, 1)["mask"][:, 2 * K :: 2]
  assert abs(uniform.mean(axis=0) - K / slots).max() < 0.05


def test_chance_accuracy_with_and_without_knowing_the_values(batch):
  random, mask = np.random.default_rng(0), batch["mask"]
  targets = batch["targets"][mask].reshape(EXAMPLES, K)
  values = batch["tokens"][:, 1 : 2 * K : 2]
  guess = values[np.arange(EXAMPLES)[:, None], random.integers(0, K, (EXAMPLES, K))]
  assert np.mean(guess == targets) == pytest.approx(1 / K, abs=0.01)
  assert np.mean(random.integers(0, V, (EXAMPLES, K)) == targets) == pytest.approx(1 / V, abs=0.003)


def test_random_tokens_between_queries():
  plain, filled = (MQAR(V, T, K, batch=64, random_non_queries=x) for x in (False, True))
  a, b = plain.batch(2, 0, 1), filled.batch(2, 0, 1)
  assert np.array_equal(a["mask"], b["mask"]) and np.array_equal(a["targets"], b["targets"])
  shown = a["tokens"] > 0
  assert np.array_equal(a["tokens"][shown], b["tokens"][shown])
  others = b["tokens"][~shown]
  assert others.mean() == pytest.approx((V - 1) / 2, rel=0.1) and others.max() == V - 1
