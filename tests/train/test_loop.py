"""An interrupted run, at any point, ends bitwise identical to an uninterrupted one."""

import gc
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from deltanet_jax.models import preset
from deltanet_jax.models.abstract import abstract_model
from deltanet_jax.train import DivergenceError, PreemptionError, check_start
from deltanet_jax.train import step as train_step
from deltanet_jax.train.checkpoint import Checkpoints
from deltanet_jax.train.step import make_trainer
from tests.support.training import damage, numbers, stop_at, tiny, train_on

# When one read of a checkpoint fails, orbax abandons the others; Python reports them at collection.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def collected():
  yield
  gc.collect()


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
  """Workdir of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
  train_on(corpus, tiny(), workdir)
  return workdir


def saved_state(workdir):
  shapes = make_trainer(tiny()).state_shapes()
  return Checkpoints(workdir, tiny().checkpoint).restore(shapes)


def assert_same(workdir, other):
  assert numbers(workdir) == numbers(other)
  (state, meta), (expected, expected_meta) = saved_state(workdir), saved_state(other)
  assert meta == expected_meta
  jax.tree.map(np.testing.assert_array_equal, state, expected)


def interrupt():
  raise KeyboardInterrupt


def test_loss_decreases_and_metrics_are_logged(uninterrupted):
  rows = numbers(uninterrupted)
  losses = [row["loss"] for row in rows if "loss" in row]
  assert len(losses) == 12 and losses[-1] < losses[0] - 1
  evaluated = [row for row in rows if "validation_loss" in row]
  assert [row["step"] for row in evaluated] == [6, 12]
  assert evaluated[-1]["validation_bits_per_byte"] < evaluated[0]["validation_bits_per_byte"]
  assert sorted(p.name for p in (uninterrupted / "checkpoints").iterdir()) == ["12", "8"]
  assert list((uninterrupted / "tensorboard").iterdir())


def test_sigterm_saves_and_resume_is_bitwise_identical(
  corpus, uninterrupted, tmp_path, monkeypatch
):
  with monkeypatch.context() as patch:
    stop_at(patch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(PreemptionError, match="after step 6"):
      train_on(corpus, tiny(), tmp_path / "run")
  assert (tmp_path / "run/checkpoints/6").exists()
  # A preempted run saves without evaluating; it evaluates when it resumes.
  assert not any("validation_loss" in row for row in numbers(tmp_path / "run"))
  train_on(corpus, tiny(), tmp_path / "run")
  assert_same(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
  "how",
  [*(pytest.param(x, marks=pytest.mark.slow) for x in ("truncated", "deleted")), "flipped"],
)
def test_resume_skips_a_damaged_checkpoint(corpus, uninterrupted, tmp_path, monkeypatch, how):
  workdir = tmp_path / "run"
  with monkeypatch.context() as patch:
    stop_at(patch, 10, interrupt)
    with pytest.raises(KeyboardInterrupt):
      train_on(corpus, tiny(), workdir)
  damage(workdir, 8, how)
  reports = []
  train_on(corpus, tiny(), workdir, report=reports.append)
  assert "checkpoint 8 is damaged" in reports[0] and "resuming from step 4" in reports[1]
  assert (workdir / "damaged/8").exists()
  assert_same(workdir, uninterrupted)


def test_from_scratch_if_every_checkpoint_is_damaged(uninterrupted, corpus, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(uninterrupted, workdir)
  for step in (8, 12):
    damage(workdir, step, "deleted")
  metrics = (workdir / "metrics.jsonl").read_bytes()
  for _ in range(2):  # a second start raises as well
    with pytest.raises(ValueError, match=r"every checkpoint in .* was damaged .* --from_scratch"):
      train_on(corpus, tiny(), workdir)
  assert (workdir / "metrics.jsonl").read_bytes() == metrics
  train_on(corpus, tiny(), workdir, from_scratch=True)
  assert_same(workdir, uninterrupted)
  assert (workdir / "metrics.1.jsonl").read_bytes() == metrics
  assert sorted(p.name for p in (workdir / "damaged").iterdir()) == ["12", "8"]
  assert (workdir / "tensorboard.1").exists()
  # From here on the flag has no effect.
  reports = []
  train_on(corpus, tiny(), workdir, from_scratch=True, report=reports.append)
  assert reports == ["resuming from step 12 of 12"]


def test_divergence_raises(corpus, tmp_path):
  cfg = tiny(max_bad_updates=3)
  cfg.optimizer.learning_rate = cfg.optimizer.initial_learning_rate = 1e38
  with pytest.raises(DivergenceError, match=r"3 consecutive .* no checkpoint was saved yet"):
    train_on(corpus, cfg, tmp_path / "run")


def test_startup_traces_the_model_once(corpus, tmp_path, monkeypatch):
  built = []
  monkeypatch.setattr(
    train_step, "abstract_model", lambda cfg: (built.append(cfg), abstract_model(cfg))[1]
  )
  cfg = tiny(tokens=256)
  trainer = check_start(cfg, tmp_path / "run")
  train_on(corpus, cfg, tmp_path / "run", trainer=trainer)
  assert len(built) == 1


def test_invalid_starts_raise_before_writing(corpus, uninterrupted, tmp_path):
  before = sorted(p.name for p in uninterrupted.rglob("*"))
  with pytest.raises(ValueError, match="seed = 0, now it is 1"):
    train_on(corpus, tiny(seed=1), uninterrupted)
  gla = preset("gla-tiny", vocab=260, depth=2, width=32, mlp_multiple=32)
  with pytest.raises(ValueError, match=r"mixers \['deltanet'\], now they are \['gla'\]"):
    train_on(corpus, tiny(model=gla), uninterrupted)
  assert sorted(p.name for p in uninterrupted.rglob("*")) == before
  with pytest.raises(ValueError, match="less than the 258 tokens of the task"):
    small = tiny()
    small.model.vocab = 100
    train_on(corpus, small, tmp_path / "a")
  wide = tiny()
  wide.mesh.fsdp = 3
  with pytest.raises(ValueError, match="does not fit 1 devices"):
    train_on(corpus, wide, tmp_path / "a")
  assert not (tmp_path / "a").exists()
  (tmp_path / "b").mkdir()
  (tmp_path / "b/notes.txt").touch()
  with pytest.raises(ValueError, match=r"holds files but no config\.json"):
    train_on(corpus, tiny(), tmp_path / "b")
