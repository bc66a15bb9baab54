"""Losses by position against those of a single forward pass, and recall of what was told."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.data import ValidationSource
from deltanet_jax.eval import LossByPosition, PlantedRecall, evaluate
from deltanet_jax.eval.loss_by_position import bin_edges, positions
from deltanet_jax.models import build
from tests.support.training import tiny


@pytest.fixture(scope="module", autouse=True)
def as_users_run():
  """No 64 bits and no strict types, which optax does not know."""
  with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
    yield


class Rows(ValidationSource):
  """Random rows of two documents each, of which some targets count."""

  def __init__(self, length, rows, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (rows, length + 1)).astype(np.int32)
    ids = (np.arange(length)[None] >= rng.integers(1, length, (rows, 1))).astype(np.int32)
    mask = rng.random((rows, length)) < 0.7
    self.batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ids, mask=mask)

  def validation(self, host, hosts):
    assert (host, hosts) == (0, 1)
    return iter([self.batch, self.batch])


def direct(model, batch):
  """Loss of every token."""
  logits = model(jnp.asarray(batch["tokens"]), jnp.asarray(batch["segment_ids"]))
  logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
  return -np.take_along_axis(logprobs, batch["targets"][..., None], axis=2)[..., 0]


def test_losses_by_position():
  cfg = tiny()
  model = build(cfg.model)
  texts = {length: (Rows(length, rows), rows) for length, rows in ((32, 4), (64, 2))}
  found = evaluate(model, cfg, [LossByPosition(texts)])
  for length, (text, _) in texts.items():
    batch = text.batch
    losses, place = direct(model, batch), positions(batch["segment_ids"])
    mean = losses[batch["mask"]].mean()
    assert found[f"loss_{length}"] == pytest.approx(mean, rel=1e-5)
    for first, last in zip(bin_edges(length)[:-1], bin_edges(length)[1:]):
      there = batch["mask"] & (place >= first) & (place < last)
      if there.any():
        value = found[f"loss_{length}_from_{first}"]
        assert value == pytest.approx(losses[there].mean(), rel=1e-5)


def test_positions_and_bin_edges():
  ids = np.array([[0, 0, 0, 1, 1], [3, 4, 4, 4, 4]])
  assert positions(ids).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
  assert (
    bin_edges(128) == [0, 16, 32, 64, 128]
    and bin_edges(40) == [0, 16, 32, 40]
    and bin_edges(8) == [0, 8]
  )


def test_recall_is_what_being_told_saves():
  cfg = tiny()
  model = build(cfg.model)
  told, untold = Rows(32, 8), Rows(32, 8, seed=1)
  found = evaluate(model, cfg, [PlantedRecall(told, untold)])
  bits = [direct(model, x.batch)[x.batch["mask"]].mean() / math.log(2) for x in (told, untold)]
  assert found["recall_bits"] == pytest.approx(bits[0], rel=1e-5)
  assert found["recall_gain"] == pytest.approx(bits[1] - bits[0], abs=1e-4)
  assert 0 <= found["recall_accuracy"] < 0.1
