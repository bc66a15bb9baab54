"""Facts planted in text: each is planted once, queried once, and only its value is a target."""

import numpy as np
import pytest

from deltanet_jax.data import PlantedRecallText, load_tokenizer, open_corpus
from deltanet_jax.data.corpus.prepare import prepare

BYTES = load_tokenizer("bytes")
SHAPE = dict(length=256, batch=4)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
  folder = tmp_path_factory.mktemp("planted")
  (folder / "in.txt").write_text("It is a truth universally acknowledged.\n\n" * 200)
  prepare(folder / "in.txt", folder / "corpus", BYTES, validation=0.4)
  return open_corpus(folder / "corpus").validation


def sequences(split, **options):
  batches = list(PlantedRecallText(split, BYTES, **SHAPE, batches=2, **options).validation(0, 1))
  return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def test_queries_match_the_planted_facts(split):
  found = sequences(split)
  assert found["tokens"].shape == (8, 256) and not found["segment_ids"].any()
  for tokens, targets, mask in zip(found["tokens"], found["targets"], found["mask"]):
    assert tokens[0] == BYTES.bos and (tokens[1:] == targets[:-1]).all()
    text = BYTES.decode(tokens.tolist())
    answers = [BYTES.decode(x) for x in np.split(targets[mask], 4)]
    assert all(len(value) == 5 for value in answers)
    for value in answers:
      # Once in the fact and once in the query, whose full stop may be the target after the input.
      assert text.count(f" is {value}.") + text.endswith(f" is {value}") == 2


def test_the_control_differs_only_in_planted_values(split):
  planted, control = sequences(split), sequences(split, plant_answers=False)
  mask = planted["mask"]
  assert (mask == control["mask"]).all()
  assert (planted["targets"][mask] == control["targets"][mask]).all()
  different = planted["tokens"] != control["tokens"]
  assert 0 < different.sum() <= 8 * 4 * 5
  for tokens, targets, mask in zip(control["tokens"], control["targets"], control["mask"]):
    text = BYTES.decode(tokens.tolist())
    for value in np.split(targets[mask], 4):
      assert text.count(f" is {BYTES.decode(value)}.") <= 1


def test_batches_are_the_same_for_any_number_of_hosts(split):
  planted = PlantedRecallText(split, BYTES, **SHAPE, batches=1)
  (full,) = planted.validation(0, 1)
  parts = [next(planted.validation(host, 2)) for host in range(2)]
  for name in full:
    assert (np.concatenate([part[name] for part in parts]) == full[name]).all()
  assert not (sequences(split, seed=1)["tokens"] == sequences(split)["tokens"]).all()


def test_too_short_sequences_raise(split):
  with pytest.raises(ValueError, match="are too short for 9 facts and queries"):
    PlantedRecallText(split, BYTES, **SHAPE, pairs=9)
