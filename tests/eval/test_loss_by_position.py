"""Loss by position and planted recall against a single forward pass."""

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
  """Default JAX settings, without x64 and strict promotion."""
  with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
    yield


class RandomSequences(ValidationSource):
  """Random sequences of two segments each, with some targets scored."""

  def __init__(self, length, batch, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (batch, length + 1)).astype(np.int32)
    ids = (np.arange(length)[None] >= rng.integers(1, length, (batch, 1))).astype(np.int32)
    mask = rng.random((batch, length)) < 0.7
    self.batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], segment_ids=ids, mask=mask)

  def validation(self, host, hosts):
    assert (host, hosts) == (0, 1)
    return iter([self.batch, self.batch])


def direct(model, batch):
  """Return the loss of every token."""
  logits = model(jnp.asarray(batch["tokens"]), jnp.asarray(batch["segment_ids"]))
  logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
  return -np.take_along_axis(logprobs, batch["targets"][..., None], axis=2)[..., 0]


def test_losses_by_position():
  cfg = tiny()
  model = build(cfg.model)
  sizes = ((32, 4), (64, 2))
  sources = {length: (RandomSequences(length, batch), batch) for length, batch in sizes}
  found = evaluate(model, cfg, [LossByPosition(sources)])
  for length, (source, _) in sources.items():
    batch = source.batch
    losses, position = direct(model, batch), positions(batch["segment_ids"])
    mean = losses[batch["mask"]].mean()
    assert found[f"loss_{length}"] == pytest.approx(mean, rel=1e-5)
    for first, last in zip(bin_edges(length)[:-1], bin_edges(length)[1:]):
      there = batch["mask"] & (position >= first) & (position < last)
      if there.any():
        value = found[f"loss_{length}_from_{first}"]
        assert value == pytest.approx(losses[there].mean(), rel=1e-5)


def test_positions_and_bin_edges():
  ids = np.array([[0, 0, 0, 1, 1], [3, 4, 4, 4, 4]])
  assert positions(ids).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
  assert bin_edges(128) == [0, 16, 32, 64, 128]
  assert bin_edges(40) == [0, 16, 32, 40] and bin_edges(8) == [0, 8]


def test_recall_gain_is_the_difference_in_bits():
  cfg = tiny()
  model = build(cfg.model)
  planted, control = RandomSequences(32, 8), RandomSequences(32, 8, seed=1)
  found = evaluate(model, cfg, [PlantedRecall(planted, control)])
  nats = [direct(model, x.batch)[x.batch["mask"]].mean() for x in (planted, control)]
  bits = [x / math.log(2) for x in nats]
  assert found["recall_bits"] == pytest.approx(bits[0], rel=1e-5)
  assert found["recall_gain"] == pytest.approx(bits[1] - bits[0], abs=1e-4)
  assert 0 <= found["recall_accuracy"] < 0.1
