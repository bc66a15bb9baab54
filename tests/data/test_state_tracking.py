"""State tracking: running products of permutations against a plain loop."""

import itertools

import numpy as np
import pytest

from deltanet_jax.data import StateTracking
from deltanet_jax.data.synthetic.state_tracking import GROUPS


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("length", [1, 2, 13])
def test_targets_are_the_composed_permutations(group, length):
  elements = list(itertools.permutations(range(GROUPS[group])))
  task = StateTracking(group, length=length, batch=40)
  batch = task.batch(3, 0, 1)
  assert batch["tokens"].shape == batch["targets"].shape == (40, length) == task.shape
  assert batch["mask"].all() and task.vocab == len(elements)
  assert set(batch["tokens"].flat) == set(range(task.vocab))
  for tokens, targets in zip(batch["tokens"], batch["targets"]):
    things = range(GROUPS[group])
    for token, target in zip(tokens, targets):
      things = tuple(elements[token][thing] for thing in things)
      assert elements[target] == things


def test_parity_is_the_running_xor():
  batch = StateTracking("parity", length=50, batch=8).batch(0, 0, 1)
  np.testing.assert_array_equal(batch["targets"], np.bitwise_xor.accumulate(batch["tokens"], 1))


def test_batches_depend_only_on_seed_step_and_split():
  make = lambda seed: StateTracking("s3", length=9, batch=4, seed=seed, validation_batches=2)
  full = make(0).batch(5, 0, 1)["tokens"]
  halves = [make(0).batch(5, host, 2)["tokens"] for host in (0, 1)]
  np.testing.assert_array_equal(full, np.concatenate(halves))
  others = [make(0).batch(6, 0, 1), make(1).batch(5, 0, 1), *make(0).validation(0, 1)]
  assert len(others) == 4 and all((x["tokens"] != full).any() for x in others)
  with pytest.raises(ValueError, match=r"group is 's9', expected one of \['parity', 's3'\]"):
    StateTracking("s9", length=9, batch=4)
