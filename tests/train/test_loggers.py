"""Metrics reach every logger: the user's objects, and Weights & Biases."""

import json
import os
import signal
import sys
import types

import pytest

from deltanet_jax.data import CorpusTask
from deltanet_jax.train import Logger, PreemptionError, WandB
from deltanet_jax.train.loggers import JsonLines, check_loggers
from experiments import plot_run
from tests.support.training import numbers, silent, stop_at, tiny


class Memory:
  """A user's logger."""

  def __init__(self):
    self.logged, self.closed = [], 0

  def log(self, step, metrics):
    self.logged.append((step, metrics))

  def close(self):
    self.closed += 1


class FakeRun:
  def __init__(self, started, **options):
    self.options, self.logged, self.finished = options, [], False
    started.append(self)

  def log(self, values, step):
    self.logged.append((step, values))

  def finish(self):
    self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch):
  """The runs that a fake `wandb` starts."""
  started = []
  fake = types.ModuleType("wandb")
  fake.__spec__ = types.SimpleNamespace()
  fake.init = lambda **options: FakeRun(started, **options)
  monkeypatch.setitem(sys.modules, "wandb", fake)
  return started


def run(corpus, workdir, **options):
  cfg = tiny(tokens=4 * 256)
  cfg.model.depth = 1
  task = CorpusTask(corpus, length=cfg.data.length, batch=cfg.data.batch)
  return silent(cfg, workdir, task, **options)


def test_loggers_receive_what_metrics_jsonl_has(corpus, tmp_path, monkeypatch, wandb_runs):
  memory, workdir = Memory(), tmp_path / "run"
  assert isinstance(memory, Logger)
  evaluators = [lambda context: [("half", 0.5)]]
  start = lambda: run(
    corpus, workdir, evaluators=evaluators, loggers=[memory, WandB("project", workdir)]
  )
  with monkeypatch.context() as patch:
    stop_at(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(PreemptionError):
      start()
  assert memory.closed == 1
  start()
  assert memory.closed == 2
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  expected = [(line.pop("step"), line) for line in lines]
  assert [step for step, _ in expected] == [1, 2, 3, 4, 4] and expected[-1] == (4, {"half": 0.5})
  assert memory.logged == expected
  first, second = wandb_runs
  assert first.logged + second.logged == expected and first.finished and second.finished
  # The second start resumes the W&B run of the first.
  assert first.options["id"] == second.options["id"]
  assert second.options["resume"] == "allow" and second.options["name"] == "run"


def test_an_object_that_is_not_a_logger_is_rejected():
  check_loggers([Memory()])
  for wrong in (print, Memory, FakeRun([])):
    with pytest.raises(ValueError, match=r"is not a logger: expected an object with log\(step"):
      check_loggers([wrong])


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"Weights & Biases needs the extra `wandb`.*pip install"):
    WandB("project", tmp_path)


def test_json_lines_drops_repeated_steps(tmp_path):
  log = JsonLines(tmp_path, 0)
  for step in range(4):
    log.log(step, dict(loss=float("nan") if step else 1.0))
  log.close()
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"step": 2, "lo')
  JsonLines(tmp_path, 2).close()
  assert numbers(tmp_path) == [dict(step=0, loss=1.0), *(dict(step=i, loss=None) for i in (1, 2))]


def test_plot_run(tmp_path):
  for name in "ab":
    (tmp_path / name).mkdir()
    log = JsonLines(tmp_path / name, 0)
    for step in range(1, 6):
      log.log(step, dict(loss=5.0 / step, learning_rate=1e-3, grad_norm=float("nan")))
    log.log(5, dict(validation_loss=1.2, accuracy=0.5))
    log.close()
  curves = plot_run.read(tmp_path / "a")
  assert curves["loss"][0] == (1, 5.0) and "grad_norm" not in curves
  drawn = plot_run.figure({name: plot_run.read(tmp_path / name) for name in "ab"}, ("accuracy",))
  titles = [axes.get_title(loc="left") for axes in drawn.axes]
  assert titles[1:4] == ["learning rate", "gradient norm", "throughput (tokens/s)"]
  assert [len(axes.lines) for axes in drawn.axes] == [4, 2, 0, 0, 2]
  with pytest.raises(ValueError, match=r"has no metrics\.jsonl: expected the folder of a training"):
    plot_run.read(tmp_path)
