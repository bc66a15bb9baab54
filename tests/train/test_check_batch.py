"""A task that makes its batches wrongly is reported in one sentence, before it trains on them."""

import numpy as np
import pytest

from deltanet_jax import device_batches, sharding
from deltanet_jax.data import Task
from deltanet_jax.eval import Validation
from tests.support.training import numbers, silent, tiny


class Random(Task):
  """Random tokens; `spoil` changes the batch of one step."""

  vocab, shape = 64, (8, 32)

  def __init__(self, spoil=None, at=0):
    self._spoil, self._at = spoil, at

  def identity(self):
    return {}

  def batch(self, step, host, hosts):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, self.vocab, self.shape)  # int64
    batch = dict(
      tokens=tokens,
      targets=np.where(rng.random(self.shape) < 0.5, tokens, -100),
      segment_ids=np.ones(self.shape, np.int32),
    )
    batch["mask"] = batch["targets"] >= 0
    if self._spoil is not None and step == self._at:
      batch = self._spoil(batch)
    return batch

  def validation(self, host, hosts):
    yield self.batch(self._at, host, hosts)


def change(**functions):
  return lambda batch: batch | {name: f(batch[name]) for name, f in functions.items()}


def one_id(value):
  def put(x):
    x = x.copy()
    x[-1, -1] = value
    return x

  return put


WRONG = {
  "tokens above": (
    change(tokens=one_id(64)),
    "id 64 in tokens, expected ids of .* 0 to 63",
  ),
  "tokens below": (change(tokens=one_id(-1)), "id -1 in tokens"),
  "targets": (change(targets=one_id(64), mask=one_id(True)), "id 64 in targets"),
  "no mask": (lambda batch: {k: batch[k] for k in batch if k != "mask"}, "no mask, expected"),
  "float mask": (change(mask=np.float32), "mask of dtype float32, expected a NumPy array of bool"),
  "empty mask": (change(mask=np.zeros_like), "a mask that is False everywhere, expected scored"),
  "length": (change(tokens=lambda x: x[:, 1:]), r"tokens of shape \[8, 31\], expected \[8, 32\]"),
  "mask shape": (change(mask=lambda x: x[0]), r"mask of shape \[32\], expected \[8, 32\]"),
  "dtype": (
    change(targets=np.float64),
    "targets of dtype float64, expected .* int32",
  ),
}


@pytest.fixture(scope="module")
def shapes():
  mesh = sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, sequence=1))
  return device_batches.batch_shapes(mesh, 8, 32)


@pytest.mark.parametrize("spoil,message", WRONG.values(), ids=WRONG)
def test_a_wrong_batch_is_named(shapes, spoil, message):
  batch = Random().batch(0, 0, 1)
  check = lambda batch: device_batches.check_batch(
    batch, shapes, vocab=64, what="batch 0 of Random", scored=True
  )
  check(batch)
  with pytest.raises(ValueError, match=f"^batch 0 of Random has .*{message}"):
    check(spoil(batch))


def test_training_and_validation_check_batches(tmp_path):
  cfg = tiny(tokens=3 * 256, eval_every=1)
  cfg.model.depth, cfg.model.vocab = 1, 64
  spoil = WRONG["tokens above"][0]
  with pytest.raises(ValueError, match="batch 1 of Random has the id 64"):
    silent(cfg, tmp_path / "a", Random(spoil, at=1))
  task = Random(spoil, at=100)
  with pytest.raises(ValueError, match="batch 0 of an evaluation has the id 64"):
    silent(cfg, tmp_path / "b", task, evaluators=[Validation(task)])
  # Any integers are accepted, and unscored targets may be anything.
  silent(cfg, tmp_path / "c", Random())
  rows = numbers(tmp_path / "c")
  assert len(rows) == 3 and all(row["loss"] > 0 and row["skipped"] == 0 for row in rows)
