"""MAD tasks: exact solvers reach 100%, and statistics match the benchmark."""

import numpy as np
import pytest

from deltanet_jax.data import mad
from deltanet_jax.data.synthetic.base import VALIDATION
from deltanet_jax.eval.accuracy import macro_accuracy


def evaluation_batch(name, examples=400, setting=0, **changes):
  """Return a task and one validation batch."""
  settings = mad.SETTINGS[name][setting] | dict(examples=None) | changes
  task = mad.make(name, batch=examples, **settings)
  return task, task.draw(task.random(VALIDATION, 0), examples, evaluation=True)


def by_last_seen(task, tokens):
  """Predict the token that followed the previous occurrence."""
  known, answers = {}, []
  for token, after in zip(tokens, [*tokens[1:], 0]):
    answers.append(known.get(token, 0))
    known[token] = after
  return answers


def by_motif(task, tokens):
  """Predict the next token of the value of the last three tokens as a key, if seen before."""
  keys, known, answers = (task.vocab - 1) // 2, {}, []
  key, value = (), ()
  for token in tokens:
    if token < keys:
      if value or len(key) == 3:
        known[key], key, value = value, (), ()
      key = (*key, token)
    elif token < task.vocab - 1:
      value = (*value, token)
    expected = known.get(key, ())
    answers.append(expected[len(value)] if len(value) < len(expected) else 0)
  return answers


def by_copying(task, tokens):
  content = [token for token in tokens if token < task.vocab - 2]
  return [0] * (len(tokens) - len(content)) + content


SOLVERS = dict(
  context_recall=by_last_seen,
  noisy_recall=by_last_seen,
  fuzzy_recall=by_motif,
  selective_copy=by_copying,
  memorize=lambda task, tokens: [0, *task.values[tokens[::2]].repeat(2)][: len(tokens)],
  compress=lambda task, tokens: tokens,
)


@pytest.mark.parametrize("name", mad.TASKS)
def test_an_exact_solver_is_always_right(name):
  for setting in (0, -1):
    task, batch = evaluation_batch(name, 60, setting)
    mask = batch["mask"]
    answers = np.array([SOLVERS[name](task, x) for x in batch["tokens"]])
    assert mask.any() and np.array_equal(answers[mask], batch["targets"][mask])
    assert macro_accuracy(batch["targets"][mask], answers[mask]) == 1


def test_settings_change_one_factor_of_the_baseline():
  assert {k: len(v) for k, v in mad.SETTINGS.items()} == dict(
    context_recall=11, noisy_recall=14, fuzzy_recall=11, selective_copy=13, memorize=6, compress=11
  )
  for name, settings in mad.SETTINGS.items():
    for setting in settings:
      assert len(setting.items() - settings[0].items()) == (setting is not settings[0])
      task = mad.make(name, batch=128, **setting)
      L = setting["length"] - (name in ("context_recall", "noisy_recall"))
      assert task.shape == (128, L) and task.vocab == setting["vocab"]
      assert task.epoch == -(-setting["examples"] // 128)


@pytest.mark.parametrize("vocab, scored", [(16, 56), (128, 24)])
def test_recall_scores_keys_seen_before(vocab, scored):
  task, batch = evaluation_batch("context_recall", vocab=vocab)
  tokens, mask = batch["tokens"], batch["mask"]
  assert mask.sum(axis=1).mean() == pytest.approx(scored, abs=1)
  assert mask[:, -1].all() and not mask[:, 1::2].any()
  assert (tokens[:, ::2] < vocab // 2).all() and (tokens[:, 1::2] >= vocab // 2).all()
  assert len(set(tokens[:, 1::2].flat)) == vocab // 2
  assert np.array_equal(tokens[:, 1:], batch["targets"][:, :-1])
  trained = task.batch(0, 0, 1)
  assert trained["mask"].all()
  assert np.array_equal(trained["tokens"][:, 1:], trained["targets"][:, :-1])


def test_the_last_key_is_uniform_over_distinct_earlier_keys():
  """However often each occurred."""
  _, batch = evaluation_batch("context_recall", 6000, vocab=6, length=8)
  keys = batch["tokens"][:, ::2]
  odd = np.array([sorted(np.bincount(x[:3], minlength=3)) == [0, 1, 2] for x in keys])
  twice = np.array([np.argmax(np.bincount(x[:3])) for x in keys[odd]])
  assert np.mean(keys[odd, -1] == twice) == pytest.approx(1 / 2, abs=0.03)


@pytest.mark.parametrize("noise", [0.2, 0.8])
def test_noise_has_its_fraction_and_is_never_scored(noise):
  _, batch = evaluation_batch("noisy_recall", noise=noise)
  noisy = batch["tokens"] >= 16
  pairs = noisy[:, :-1].reshape(len(noisy), -1, 2)
  assert np.array_equal(pairs[..., 0], pairs[..., 1])
  # One of 64 pairs is never noise; the last is not among these 63.
  expected = noise * (1 - 1 / 64)
  assert pairs.mean() == pytest.approx(expected, abs=4 * np.sqrt(0.25 / pairs[..., 0].size))
  assert not (batch["mask"] & (noisy | (batch["targets"] >= 16))).any()
  assert set(batch["tokens"][noisy]) == set(range(16, 32)) and not noisy[:, -1].any()
  _, short = evaluation_batch(
    "noisy_recall", length=4, noise=0.9
  )  # even if all pairs would be noise
  assert (short["tokens"][:, 0] < 8).all() and short["mask"][:, -1].all()


def plain_fuzzy(random, T, V, evaluation):
  """Draw one example by a loop: (tokens of pairs, scored tokens, whether the probe was seen)."""
  keys, values = np.arange((V - 1) // 2), np.arange((V - 1) // 2, V - 1)
  size = lambda: 3 if evaluation else random.integers(1, 4)
  draw = lambda of, n: tuple(random.choice(of, n, replace=False))
  probe, answer = draw(keys, size()), draw(values, random.integers(1, 4))
  both = len(probe) + len(answer)
  at, tokens, known, scored = random.integers(0, T - 2 * both), [], {}, 0
  while len(tokens) < T - both - 6:
    if len(tokens) >= at and probe not in known:
      key, value = probe, answer
    else:
      key = draw(keys, size())
      fresh = draw(values, random.integers(1, 4))
      value = answer if key == probe else known.get(key, fresh)
    scored += len(value) * (key in known)
    tokens += [*key, *value]
    known[key] = value
  return len(tokens) + both, scored + len(answer) * (probe in known), probe in known


@pytest.mark.parametrize("vocab", [8, 16])
def test_fuzzy_recall_has_the_statistics_of_a_plain_loop(vocab):
  random, T = np.random.default_rng(0), 64
  task, batch = evaluation_batch("fuzzy_recall", 3000, vocab=vocab, length=T)
  plain = np.array([plain_fuzzy(random, T, vocab, True) for _ in range(800)])
  used = 1 + (batch["tokens"] != vocab - 1).sum(axis=1)
  seen = batch["mask"][:, -1]
  for ours, theirs in zip((used, batch["mask"].sum(axis=1), seen), plain.T):
    error = np.sqrt(ours.var() / len(ours) + theirs.var() / len(theirs))
    assert abs(ours.mean() - theirs.mean()) < 4.5 * error + 1e-9
  assert 0.9 < seen.mean() < 1  # a probe that was not seen before is not scored
  trained = task.batch(0, 0, 1)
  assert trained["mask"].all()
  theirs = np.array([plain_fuzzy(random, T, vocab, False)[0] for _ in range(800)])
  ours = 1 + (trained["tokens"] != vocab - 1).sum(axis=1)
  assert abs(ours.mean() - theirs.mean()) < 4.5 * np.sqrt(2 * theirs.var() / 800)


def test_motifs_have_one_to_three_distinct_tokens_in_training():
  task = mad.make("fuzzy_recall", vocab=64, length=128, examples=None, batch=300)
  keys, sizes = 31, {True: [], False: []}
  for x in task.batch(0, 0, 1)["tokens"]:
    x = x[x < 63]
    boundaries = np.flatnonzero(np.diff(x < keys)) + 1
    for motif in np.split(x, boundaries)[:-1]:
      assert len(set(motif)) == len(motif)
      sizes[bool(motif[0] < keys)].append(len(motif))
  for found in sizes.values():
    share = np.bincount(found, minlength=4) / len(found)
    assert len(share) == 4 and abs(share[1:] - 1 / 3).max() < 0.03


def test_selective_copy_has_blanks_before_tokens_and_at_the_targets():
  n, T, V = 16, 256, 16
  _, batch = evaluation_batch("selective_copy")
  tokens, mask = batch["tokens"], batch["mask"]
  assert (tokens[:, -n:] == V - 2).all() and (tokens[:, -n - 1] == V - 1).all()
  assert mask[:, -n:].all() and not mask[:, :-n].any()
  before = tokens[:, : -n - 1]
  content = before < V - 2
  assert (content.sum(axis=1) == n).all() and content[:, -1].all()
  positions = np.nonzero(content)[1].reshape(-1, n)
  gaps = np.diff(positions, axis=1, prepend=-1) - 1
  assert abs(gaps.mean(axis=0) / ((T - 2 * n - 1) / n) - 1).max() < 0.1
  # Binomial: each blank is placed before a uniformly drawn token.
  assert gaps.var() == pytest.approx((T - 2 * n - 1) / n * (1 - 1 / n), rel=0.1)
  shuffled = np.random.default_rng(0).permuted(batch["targets"][:, -n:], axis=1)
  right = np.mean(shuffled == batch["targets"][:, -n:])
  assert right == pytest.approx(1 / n + (1 - 1 / n) / (V - 2), abs=0.02)


def test_accuracy_limit_of_memorization():
  """Keys absent from training cannot be known; with more keys there are more of them."""
  reached = []
  for setting in mad.SETTINGS["memorize"]:
    task = mad.make("memorize", batch=256, **setting)
    keys = (setting["vocab"] - 1) // 2
    assert len(set(task.values)) == keys and task.values.min() >= keys
    assert task.values.max() < setting["vocab"] - 1
    train, test = task.batch(0, 0, 1), next(task.test.validation(0, 1))
    assert not np.isin(train["tokens"], task.values).any()  # values never appear in the input
    known = np.isin(test["tokens"][:, ::2], train["tokens"][:, ::2])
    expected = 1 - (1 - 1 / keys) ** (256 * 16)
    assert known.mean() == pytest.approx(expected, abs=0.03)
    reached.append(known.mean())
  assert np.mean(reached) == pytest.approx(0.91, abs=0.01)
  other = mad.make("memorize", batch=4, seed=1, **mad.SETTINGS["memorize"][0])
  assert (other.values != mad.make("memorize", batch=4, **mad.SETTINGS["memorize"][0]).values).any()


def test_chance_accuracy_of_compression():
  _, batch = evaluation_batch("compress", 1280)
  guess = np.random.default_rng(0).integers(0, 15, batch["tokens"].shape)
  guess[:, -1] = 15
  macro = macro_accuracy(batch["targets"].ravel(), guess.ravel())
  assert macro == pytest.approx(2 / 16, abs=0.005)
  assert np.mean(guess == batch["targets"]) == pytest.approx((1 + 31 / 15) / 32, abs=0.005)
  assert (batch["tokens"][:, -1] == 15).all() and (batch["tokens"][:, :-1] < 15).all()
