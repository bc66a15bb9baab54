"""Packed batches of a corpus: windows of the token stream, for any hosts, workers and resumes."""

import itertools
import json

import grain
import numpy as np
import pytest

from deltanet_jax.data import CorpusTask, training_batches
from deltanet_jax.data.corpus.sequences import evaluation_batches

NAMES = ("tokens", "targets", "segment_ids", "mask")
LENGTH, BATCH = 32, 8


def stream_of(split):
  """Read tokens and document numbers directly from the files."""
  tokens, documents = [], []
  for shard in split.info.shards:
    ids = np.fromfile(split.folder / f"{shard.name}.bin", "<u2")
    starts = np.zeros(len(ids), int)
    starts[np.fromfile(split.folder / f"{shard.name}.idx", "<i8")] = 1
    tokens.append(ids)
    documents.append(starts)
  return np.concatenate(tokens), np.cumsum(np.concatenate(documents))


def batches_of(corpus, *, length=LENGTH, batch=BATCH, seed=0, **options):
  return training_batches(CorpusTask(corpus, length=length, batch=batch, seed=seed), **options)


def take(batches, count):
  return list(itertools.islice(batches, count))


def assert_equal(got, want):
  assert len(got) == len(want)
  for x, y in zip(got, want):
    assert set(x) == set(NAMES)
    for name in NAMES:
      np.testing.assert_array_equal(x[name], y[name], err_msg=name)


def joined(parts):
  """Concatenate the batches of several hosts."""
  return {name: np.concatenate([part[name] for part in parts]) for name in NAMES}


def test_sequences_are_windows_of_the_stream(corpus):
  split = corpus.train
  assert len(split.info.shards) > 5
  tokens, documents = stream_of(split)
  windows = (split.tokens - 1) // LENGTH
  found = []
  order = batches_of(corpus, batch=1)
  for batch in take(order, windows):
    assert [batch[n].dtype for n in NAMES] == [np.int32, np.int32, np.int32, np.bool_]
    at = [
      w
      for w in range(windows)
      if (tokens[w * LENGTH :][:LENGTH] == batch["tokens"][0]).all()
      and (tokens[w * LENGTH + 1 :][:LENGTH] == batch["targets"][0]).all()
    ]
    assert len(at) == 1
    found += at
    number = documents[at[0] * LENGTH :][: LENGTH + 1]
    np.testing.assert_array_equal(batch["segment_ids"][0], number[:-1] - number[0] + 1)
    np.testing.assert_array_equal(batch["mask"][0], number[1:] == number[:-1])
    # Exactly the BOS of the next document is masked.
    np.testing.assert_array_equal(batch["mask"][0], batch["targets"][0] != 256)
  # An epoch has every window once, shuffled; the next one is reshuffled.
  assert sorted(found) == list(range(windows)) != found
  again = take(order, windows)
  first = take(batches_of(corpus, batch=1), windows)
  key = lambda batches: [batch["tokens"].tobytes() for batch in batches]
  assert key(again) != key(first)
  assert sorted(key(again)) == sorted(key(first))


def test_a_document_longer_than_a_sequence_fills_sequences(corpus):
  batches = take(batches_of(corpus), 40)
  one_document = [b["mask"][i].all() for b in batches for i in range(BATCH)]
  assert any(one_document)
  assert all(b["segment_ids"].min() == 1 for b in batches)


def test_batches_depend_only_on_seed_and_step(corpus):
  make = lambda **kw: batches_of(corpus, **kw)
  want = take(make(seed=3), 20)
  assert_equal(take(make(seed=3), 20), want)
  assert_equal(take(make(seed=3, workers=1), 20), want)
  assert_equal(take(make(seed=3, workers=3), 20), want)
  other = take(make(seed=4), 20)
  assert any((x["tokens"] != y["tokens"]).any() for x, y in zip(other, want))


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_shard_the_same_batches(corpus, hosts):
  make = lambda **kw: batches_of(corpus, seed=5, **kw)
  parts = [take(make(host=h, hosts=hosts, workers=h), 12) for h in range(hosts)]
  assert all(batch["tokens"].shape == (BATCH // hosts, LENGTH) for batch in parts[0])
  assert_equal([joined(step) for step in zip(*parts)], take(make(), 12))


@pytest.mark.parametrize("before,after", [(0, 0), (0, 2), (3, 0), (2, 3)])
def test_a_restored_iterator_resumes(corpus, before, after):
  make = lambda workers, start=0: batches_of(corpus, seed=7, workers=workers, start=start)
  batches = make(before)
  take(batches, 11)
  state = json.loads(json.dumps(batches.get_state()))
  assert state == {"next_index": 11}
  want = take(batches, 9)
  restored = make(after)
  take(restored, 3)
  restored.set_state(state)
  assert_equal(take(restored, 9), want)
  assert_equal(take(make(after, start=11), 9), want)


def test_resuming_from_a_grain_checkpoint(corpus, tmp_path):
  make = lambda: batches_of(corpus, workers=2)
  batches = make()
  take(batches, 4)
  handler = grain.checkpoint.CheckpointHandler()
  handler.save(tmp_path, batches)
  restored = handler.restore(tmp_path, make())
  assert_equal(take(restored, 5), take(batches, 5))


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("batch", [2, 64])
@pytest.mark.parametrize("length", [1, 31, 100_000])
def test_evaluation_scores_each_target_once(corpus, length, batch, hosts):
  split = corpus.validation
  if length == 1:
    batch *= 16
  parts = [
    list(evaluation_batches(split, length=length, batch=batch, host=h, hosts=hosts))
    for h in range(hosts)
  ]
  batches = [joined(step) for step in zip(*parts, strict=True)]
  assert all(b["tokens"].shape == (batch, length) for b in batches)
  assert all(b["segment_ids"].min() >= 1 for b in batches)
  pairs = np.concatenate(
    [np.stack([b["tokens"][b["mask"]], b["targets"][b["mask"]]], 1) for b in batches]
  )
  tokens, _ = stream_of(split)
  inside = tokens[1:] != 256
  np.testing.assert_array_equal(pairs, np.stack([tokens[:-1], tokens[1:]], 1)[inside])
  assert len(pairs) == split.tokens - split.documents == split.bytes + split.documents
  # EOS is a target.
  assert sum(pairs[:, 1] == 257) == split.documents


@pytest.mark.parametrize(
  "wrong,message",
  [
    (dict(length=LENGTH, batch=4096), "fewer than the batch size 4096"),
    (dict(length=10**6, batch=1), "has 0 sequences of 1000000 tokens"),
    (dict(length=LENGTH, batch=9, hosts=2), "multiple of the 2 hosts"),
    (dict(length=LENGTH, batch=8, host=2, hosts=2), "expected 0 to 1"),
    (dict(length=0, batch=8), "length is 0"),
    (dict(length=LENGTH, batch=8, seed=-1), "seed is -1"),
  ],
)
def test_impossible_batches_raise(corpus, wrong, message):
  with pytest.raises(ValueError, match=message):
    batches_of(corpus, **wrong)
