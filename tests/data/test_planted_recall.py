"""Names and values planted in text: told once, asked for once, and nothing else is a target."""

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


def rows(split, **options):
  batches = list(PlantedRecallText(split, BYTES, **SHAPE, batches=2, **options).validation(0, 1))
  return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def test_what_is_asked_was_told(split):
  found = rows(split)
  assert found["tokens"].shape == (8, 256) and not found["segment_ids"].any()
  for tokens, targets, mask in zip(found["tokens"], found["targets"], found["mask"]):
    assert tokens[0] == BYTES.bos and (tokens[1:] == targets[:-1]).all()
    text = BYTES.decode(tokens.tolist())
    asked = [BYTES.decode(x) for x in np.split(targets[mask], 4)]
    assert all(len(value) == 5 for value in asked)
    for value in asked:
      # Once where it is told and once, but for the target after the last input, where it is asked.
      assert text.count(f" is {value}.") + text.endswith(f" is {value}") == 2


def test_without_being_told_only_the_values_differ(split):
  told, untold = rows(split), rows(split, told=False)
  assert (told["mask"] == untold["mask"]).all()
  assert (told["targets"][told["mask"]] == untold["targets"][told["mask"]]).all()
  different = told["tokens"] != untold["tokens"]
  assert 0 < different.sum() <= 8 * 4 * 5
  for tokens, targets, mask in zip(untold["tokens"], untold["targets"], untold["mask"]):
    text = BYTES.decode(tokens.tolist())
    for value in np.split(targets[mask], 4):
      assert text.count(f" is {BYTES.decode(value)}.") <= 1


def test_rows_are_the_same_for_any_number_of_hosts(split):
  planted = PlantedRecallText(split, BYTES, **SHAPE, batches=1)
  (whole,) = planted.validation(0, 1)
  parts = [next(planted.validation(host, 2)) for host in range(2)]
  for name in whole:
    assert (np.concatenate([part[name] for part in parts]) == whole[name]).all()
  assert not (rows(split, seed=1)["tokens"] == rows(split)["tokens"]).all()


def test_no_room(split):
  with pytest.raises(ValueError, match="have no room for 9 names and values told and asked"):
    PlantedRecallText(split, BYTES, **SHAPE, pairs=9)
