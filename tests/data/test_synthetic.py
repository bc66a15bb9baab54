"""Synthetic tasks: batches determined by seed, step and host; fixed sets; invalid settings."""

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
def test_batches_depend_only_on_seed_step_and_split(name):
  make = lambda **x: MAKERS[name](**dict(batch=4, seed=3) | SMALL | x)
  for options in (dict(), dict(examples=10), dict(examples=10, shuffle=True)):
    full = make(**options).batch(5, 0, 1)
    assert same(full, make(**options).batch(5, 0, 1))
    assert same(full, joined([make(**options).batch(5, host, 2) for host in (0, 1)]))
    B, L = make().shape
    assert all(x.shape == (B, L) for x in full.values()) and B == 4
    assert {x.dtype for k, x in full.items() if k != "mask"} == {np.dtype("int32")}
    assert full["mask"].dtype == bool and (full["segment_ids"] == 1).all()
    for id_ in (full["tokens"], full["targets"]):
      assert id_.min() >= 0 and id_.max() < make().vocab
  task = make()
  for source, examples in ((task, 6), (task.test, 5)):
    batches = list(source.validation(0, 1))
    assert len(batches) == 2 and sum(x["mask"].any(axis=1).sum() for x in batches) <= examples
    assert not batches[1]["mask"][examples - 4 :].any()  # padding
    assert same(joined(batches[:1]), joined([next(source.validation(h, 2)) for h in (0, 1)]))
  firsts = [task.batch(0, 0, 1), task.batch(1, 0, 1), make(seed=4).batch(0, 0, 1)]
  firsts += [next(task.validation(0, 1)), next(task.test.validation(0, 1))]
  texts = {x["tokens"].tobytes() for x in firsts}
  assert len(texts) == len(firsts), "two seeds, steps or splits have the same examples"
  assert task.identity() != make(seed=4).identity() != make(seed=4, examples=9).identity()


def test_fixed_sets_repeat_every_epoch_and_are_prefixes_of_larger_ones():
  make = lambda **x: MQAR(64, 16, 4, **dict(batch=4, examples=10) | x)
  sequences = lambda task, steps: np.concatenate(
    [x["tokens"][x["mask"].any(axis=1)] for x in (task.batch(step, 0, 1) for step in steps)]
  )
  task = make()
  assert task.epoch == 3 and make(examples=None).epoch is None
  first = sequences(task, range(3))
  assert len(first) == 10 == len({x.tobytes() for x in first})
  assert np.array_equal(first, sequences(task, range(3, 6)))
  assert np.array_equal(sequences(make(examples=700), range(3))[:10], first)
  shuffled = make(shuffle=True)
  orders = [sequences(shuffled, range(3 * epoch, 3 * epoch + 3)) for epoch in range(2)]
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
  "make, message",
  [
    (
      lambda: MQAR(64, 15, 2, batch=4),
      "length is 15 with 2 pairs, expected pairs >= 1 and an even",
    ),
    (lambda: MQAR(64, 16, 5, batch=4), r"length >= 4 \* pairs"),
    (lambda: MQAR(16, 16, 4, batch=4), "vocab is 16, expected more than the length 16"),
    (lambda: MQAR(64, 16, 4, batch=0), "batch is 0, expected at least 1"),
    (lambda: MQAR(64, 16, 4, batch=4, shuffle=True), "shuffle=True needs a fixed training set"),
    (lambda: MQAR(64, 16, 4, batch=4).batch(0, 0, 3), "expected a multiple of the 3 hosts"),
    (lambda: MAKERS["context_recall"](batch=4, length=9), "length is 9, expected an even number"),
    (
      lambda: MAKERS["context_recall"](batch=4, vocab=1),
      "vocab is 1 with noise_vocab 0, expected at least 2 more",
    ),
    (lambda: MAKERS["noisy_recall"](batch=4, noise=1.0), "noise is 1.0 and noise_vocab is 16"),
    (lambda: MAKERS["noisy_recall"](batch=4, noise_vocab=0), "noise is 0.2 and noise_vocab is 0"),
    (lambda: MAKERS["fuzzy_recall"](batch=4, vocab=6), "vocab is 6 and motif is 3"),
    (lambda: MAKERS["fuzzy_recall"](batch=4, length=12), "length is 12, expected more than 12"),
    (lambda: MAKERS["selective_copy"](batch=4, copied=12), "length is 24 and copied is 12"),
    (lambda: MAKERS["memorize"](batch=4, length=5), "length is 5, expected an even number"),
    (lambda: MAKERS["compress"](batch=4, vocab=1), "vocab is 1 and length 24"),
    (lambda: mad.make("recall", vocab=8, length=8, examples=None, batch=4), "task is 'recall'"),
    (
      lambda: MAKERS["regbench"](batch=4, states=(3, 5)),
      r"edges \(1, 3\) and states .* inconsistent",
    ),
    (lambda: MAKERS["regbench"](batch=4, letters=(2, 9)), r"max\(edges\) <= min\(letters\)"),
    (
      lambda: MAKERS["regbench"](batch=4, edges=(2, 1)),
      r"edges is \(2, 1\), expected \(low, high\)",
    ),
    (lambda: MAKERS["regbench"](batch=4, length=0), "length is 0, expected at least 1, or None"),
  ],
)
def test_invalid_settings_raise_a_one_line_message(make, message):
  with pytest.raises(ValueError, match=message) as e:
    make()
  assert "\n" not in str(e.value)
