"""Synthetic tasks as tasks: pure functions of seed, step and host, fixed sets, and bad settings."""

import numpy as np
import pytest

from deltanet_jax.data import MQAR, RegBench, mad
from deltanet_jax.data.synthetic.base import distinct

SMALL = dict(validation_examples=6, test_examples=5)
MAKERS = dict(
  mqar=lambda **x: MQAR(64, 16, 4, **x),
  regbench=lambda **x: RegBench(**dict(examples=None) | x, strings=(2, 4), string_length=(1, 6)),
)
for _name in mad.TASKS:
  _baseline = mad.SETTINGS[_name][0] | dict(length=24, examples=None)
  _baseline |= dict(copied=4) if _name == "selective_copy" else {}
  MAKERS[_name] = lambda task=_name, settings=_baseline, **x: mad.make(task, **settings | x)


def same(a, b):
  return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def joined(batches):
  return {name: np.concatenate([x[name] for x in batches]) for name in batches[0]}


@pytest.mark.parametrize("name", MAKERS)
def test_batches_are_of_seed_step_and_split_alone(name):
  make = lambda **x: MAKERS[name](**dict(batch=4, seed=3) | SMALL | x)
  for options in (dict(), dict(examples=10), dict(examples=10, shuffle=True)):
    whole = make(**options).batch(5, 0, 1)
    assert same(whole, make(**options).batch(5, 0, 1))
    assert same(whole, joined([make(**options).batch(5, host, 2) for host in (0, 1)]))
    B, L = make().shape
    assert all(x.shape == (B, L) for x in whole.values()) and B == 4
    assert {x.dtype for k, x in whole.items() if k != "mask"} == {np.dtype("int32")}
    assert whole["mask"].dtype == bool and (whole["segment_ids"] == 1).all()
    for id_ in (whole["tokens"], whole["targets"]):
      assert id_.min() >= 0 and id_.max() < make().vocab
  task = make()
  for held_out, rows in ((task, 6), (task.test, 5)):
    batches = list(held_out.validation(0, 1))
    assert len(batches) == 2 and sum(x["mask"].any(axis=1).sum() for x in batches) <= rows
    assert not batches[1]["mask"][rows - 4 :].any()  # rows that only fill the batch
    assert same(joined(batches[:1]), joined([next(held_out.validation(h, 2)) for h in (0, 1)]))
  firsts = [task.batch(0, 0, 1), task.batch(1, 0, 1), make(seed=4).batch(0, 0, 1)]
  firsts += [next(task.validation(0, 1)), next(task.test.validation(0, 1))]
  texts = {x["tokens"].tobytes() for x in firsts}
  assert len(texts) == len(firsts), "two seeds, steps or splits have the same examples"
  assert task.identity() != make(seed=4).identity() != make(seed=4, examples=9).identity()


def test_fixed_sets_come_again_and_smaller_ones_begin_larger_ones():
  make = lambda **x: MQAR(64, 16, 4, **dict(batch=4, examples=10) | x)
  rows = lambda task, steps: np.concatenate(
    [x["tokens"][x["mask"].any(axis=1)] for x in (task.batch(step, 0, 1) for step in steps)]
  )
  task = make()
  assert task.epoch == 3 and make(examples=None).epoch is None
  first = rows(task, range(3))
  assert len(first) == 10 == len({x.tobytes() for x in first})
  assert np.array_equal(first, rows(task, range(3, 6)))
  assert np.array_equal(rows(make(examples=700), range(3))[:10], first)
  shuffled = make(shuffle=True)
  orders = [rows(shuffled, range(3 * epoch, 3 * epoch + 3)) for epoch in range(2)]
  assert not np.array_equal(*orders)
  assert all(sorted(x.tolist()) == sorted(first.tolist()) for x in orders)


def test_distinct_draws_are_uniform():
  random = np.random.default_rng(0)
  drawn = distinct(random, 4, (12000, 3))
  assert all(len(set(x)) == 3 for x in drawn.tolist())
  _, counts = np.unique(drawn @ [16, 4, 1], return_counts=True)
  # 24 ordered triples, 500 of each; five standard deviations are 110.
  assert len(counts) == 24 and abs(counts - 500).max() < 110


@pytest.mark.parametrize(
  "make, said",
  [
    (lambda: MQAR(64, 15, 2, batch=4), "length is 15 with 2 pairs, expected an even length"),
    (lambda: MQAR(64, 16, 5, batch=4), "at least 4 for each of 1 or more pairs"),
    (lambda: MQAR(16, 16, 4, batch=4), "vocab is 16, expected more than the length 16"),
    (lambda: MQAR(64, 16, 4, batch=0), "batch is 0, expected at least 1"),
    (lambda: MQAR(64, 16, 4, batch=4, shuffle=True), "shuffle is of a fixed set"),
    (lambda: MQAR(64, 16, 4, batch=4).batch(0, 0, 3), "expected a multiple of the 3 hosts"),
    (lambda: MAKERS["context_recall"](batch=4, length=9), "length is 9, expected an even number"),
    (lambda: MAKERS["context_recall"](batch=4, vocab=1), "no key and value are left"),
    (lambda: MAKERS["noisy_recall"](batch=4, noise=1.0), "noise is 1.0 with 16 noise tokens"),
    (lambda: MAKERS["noisy_recall"](batch=4, noise_vocab=0), "noise is 0.2 with 0 noise tokens"),
    (lambda: MAKERS["fuzzy_recall"](batch=4, vocab=6), "vocab is 6 for motifs of up to 3"),
    (lambda: MAKERS["fuzzy_recall"](batch=4, length=12), "length is 12, expected more than 12"),
    (lambda: MAKERS["selective_copy"](batch=4, copied=12), "length is 24 for 12 tokens to copy"),
    (lambda: MAKERS["memorize"](batch=4, length=5), "length is 5, expected an even number"),
    (lambda: MAKERS["compress"](batch=4, vocab=1), "vocab is 1 and length 24"),
    (lambda: mad.make("recall", vocab=8, length=8, examples=None, batch=4), "task is 'recall'"),
    (lambda: MAKERS["regbench"](batch=4, states=(3, 5)), r"edges \(1, 3\) do not fit states"),
    (lambda: MAKERS["regbench"](batch=4, letters=(2, 9)), "an automaton needs a letter for each"),
    (lambda: MAKERS["regbench"](batch=4, edges=(2, 1)), r"edges is \(2, 1\), expected 1 or more"),
    (lambda: MAKERS["regbench"](batch=4, length=0), "length is 0, expected at least 1, or None"),
  ],
)
def test_bad_settings_are_refused_in_a_sentence(make, said):
  with pytest.raises(ValueError, match=said) as e:
    make()
  assert "\n" not in str(e.value)
