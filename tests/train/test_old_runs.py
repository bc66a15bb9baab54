"""Runs written by version 0.1.0 load, resume and evaluate with unchanged numbers.

tests/golden/run_0_1_0.tar.gz is a run of 12 updates, stopped after 6; run_0_1_0.json has the
metrics of its 12 updates and evaluations of its checkpoint at several lengths and batch sizes.
"""

import dataclasses
import json
import pathlib
import tarfile

import pytest

from deltanet_jax import sharding
from deltanet_jax.config import MeshConfig
from deltanet_jax.data import MQAR, StateTracking
from deltanet_jax.eval import (
  Accuracy,
  AccuracyByLength,
  Evaluation,
  LossByPosition,
  Validation,
  evaluate,
)
from deltanet_jax.models.abstract import abstract_model, weights_of
from deltanet_jax.train import load_trained
from tests.support.training import numbers, silent

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
EXPECTED = json.loads((GOLDEN / "run_0_1_0.json").read_text())
SIZES = dict(validation_examples=8, test_examples=8)


@pytest.fixture
def workdir(tmp_path):
  with tarfile.open(GOLDEN / "run_0_1_0.tar.gz") as archive:
    archive.extractall(tmp_path, filter="data")
  return tmp_path / "run"


def test_an_old_run_resumes(workdir):
  cfg = load_trained(workdir).config
  task = MQAR(64, 32, 4, batch=4, **SIZES)
  results = silent(cfg, workdir, task, evaluators=[Validation(task)])
  # On the machine that wrote the golden run the numbers are bitwise equal; CPUs differ in summation
  # order.
  for got, want in zip(numbers(workdir), EXPECTED["metrics"], strict=True):
    assert got == pytest.approx(want, rel=1e-5)
  assert results == pytest.approx(EXPECTED["final"], rel=1e-5)


@pytest.mark.parametrize("batch", [4, 8])
def test_evaluation_at_three_lengths(workdir, batch):
  trained = load_trained(workdir, 6)
  tasks = {L: MQAR(64, L, 2, batch=batch, seed=1, **SIZES) for L in (16, 32, 48)}
  tracking = {L: StateTracking("s3", length=L, batch=batch, seed=1) for L in tasks}
  evaluators = [
    AccuracyByLength(tracking),
    LossByPosition({L: (task, batch) for L, task in tasks.items()}),
    Accuracy(tasks[32]),
    Validation(tasks[32]),
  ]
  data = dataclasses.replace(trained.config.data, batch=batch)
  cfg = dataclasses.replace(trained.config, data=data)
  got = evaluate(trained.model, cfg, evaluators)
  assert got == pytest.approx(EXPECTED["evaluation"][str(batch)], rel=1e-6)


def test_one_evaluation_object_for_all_lengths_and_batch_sizes(workdir):
  trained = load_trained(workdir, 6)
  weights = weights_of(trained.model)
  base = Evaluation(
    abstract_model(trained.config.model),
    sharding.make_mesh(MeshConfig().sizes()),
    batch=4,
    length=32,
    max_targets=4,
    loss_chunk=trained.config.loss_chunk,
  )
  for batch in (4, 8):
    expected = EXPECTED["evaluation"][str(batch)]
    for length in (16, 32, 48):
      at = base.at(length=length, batch=batch)
      assert base.at(length=16).at(length=length, batch=batch) is at
      assert at.max_targets == (4 if length == 32 else None)
      task = MQAR(64, length, 2, batch=batch, seed=1, **SIZES)
      totals = at.totals(weights, task.validation(0, 1))
      loss = totals["loss"] / totals["targets"]
      assert loss == pytest.approx(expected[f"loss_{length}"], rel=1e-5)
      (logprobs, mask), *_ = [
        (at.target_logprobs(weights, x), x["mask"]) for x in task.validation(0, 1)
      ]
      assert logprobs.shape == (batch, length) and (logprobs[mask] < 0).all()
