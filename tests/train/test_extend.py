"""`extend`: a run continues to more tokens than it was started for."""

import json

import jax
import numpy as np
import pytest

from deltanet_jax.data import CorpusTask
from deltanet_jax.models.abstract import weights_of
from deltanet_jax.train import PreemptionError, load_trained, save_weights, workdir
from deltanet_jax.train.optim import learning_rate
from deltanet_jax.train.preemption import Stop
from tests.support.training import numbers, tiny, train_on


def longer(updates=20):
  return tiny(tokens=updates * 256)


def config_json(workdir):
  return json.loads((workdir / "config.json").read_text())


def test_extended_run_continues_data_and_schedule(corpus, tmp_path, monkeypatch):
  run, reports, read = tmp_path / "run", [], []
  with pytest.raises(ValueError, match="run has no run to extend"):
    train_on(corpus, longer(), run, extend=True)
  train_on(corpus, tiny(), run)
  batch = CorpusTask.batch
  monkeypatch.setattr(CorpusTask, "batch", lambda *a: read.append(a[1]) or batch(*a))
  with pytest.raises(ValueError, match=r"tokens = 3072, now it is 5120: .*or extend the run"):
    train_on(corpus, longer(), run)
  with monkeypatch.context() as patch, pytest.raises(PreemptionError):
    patch.setattr(Stop, "asked", lambda _, step: step == 15)
    options = dict(extend=True, origin=dict(commit="abc"), report=reports.append)
    train_on(corpus, longer(), run, **options)
  assert reports == [
    "resuming from step 12 of 20",
    "extended from 3072 to 5120 tokens: the learning rate follows the schedule of 5120 tokens, at"
    " this step 0.00456 instead of 3e-05",
  ]
  train_on(corpus, longer(), run)  # `extend` is needed once
  assert read == list(range(12, 20))  # no batch is repeated
  rates = [row["learning_rate"] for row in numbers(run) if "loss" in row]
  expected = [float(learning_rate(tiny() if i < 12 else longer(), i)) for i in range(20)]
  np.testing.assert_allclose(rates, expected, rtol=1e-6)
  extended = [{"step": 12, "from": 3072, "to": 5120, "origin": dict(commit="abc")}]
  assert config_json(run)["extended"] == extended and config_json(run)["config"]["tokens"] == 5120
  with pytest.raises(ValueError, match=r"tokens = 5120, now it is 3072: use the same, or another"):
    train_on(corpus, tiny(), run, extend=True)
  save_weights(load_trained(run), tmp_path / "weights")
  assert load_trained(tmp_path / "weights").history["extended"] == extended
  # Updates lost since the checkpoint are repeated as part of the extension.
  workdir.extend(run, longer(), 8, {})
  assert config_json(run)["extended"][0]["step"] == 8


@pytest.mark.slow
def test_extension_with_constant_rate_equals_one_longer_run(corpus, tmp_path, monkeypatch):
  """Data and optimizer state continue, also if the extension is interrupted."""

  def cfg(updates):
    cfg = longer(updates)
    opt = cfg.optimizer
    opt.initial_learning_rate = opt.final_learning_rate = opt.learning_rate
    return cfg

  train_on(corpus, cfg(20), tmp_path / "uninterrupted")
  train_on(corpus, cfg(12), tmp_path / "run")
  with monkeypatch.context() as patch, pytest.raises(PreemptionError):
    patch.setattr(Stop, "asked", lambda _, step: step == 15)
    train_on(corpus, cfg(20), tmp_path / "run", extend=True)
  train_on(corpus, cfg(20), tmp_path / "run")
  rows = [[r for r in numbers(tmp_path / n) if "loss" in r] for n in ("run", "uninterrupted")]
  assert rows[0] == rows[1]
  weights = [weights_of(load_trained(tmp_path / name).model) for name in ("run", "uninterrupted")]
  jax.tree.map(np.testing.assert_array_equal, *weights)
