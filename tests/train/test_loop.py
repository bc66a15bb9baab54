"""A run that was interrupted, anywhere and anyhow, ends as one that was not."""

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

# When one read of a checkpoint fails orbax drops the others, and Python notices sooner or later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def collected():
  yield
  gc.collect()


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
  """The folder of a run without interruption."""
  workdir = tmp_path_factory.mktemp("whole") / "run"
  train_on(corpus, tiny(), workdir)
  return workdir


def saved_state(workdir):
  shapes = make_trainer(tiny()).state_shapes()
  return Checkpoints(workdir, tiny().checkpoint).restore(shapes)


def assert_same(workdir, whole):
  assert numbers(workdir) == numbers(whole)
  (state, meta), (expected, expected_meta) = saved_state(workdir), saved_state(whole)
  assert meta == expected_meta
  jax.tree.map(np.testing.assert_array_equal, state, expected)


def interrupt():
  raise KeyboardInterrupt


def test_learns_and_reports(whole):
  rows = numbers(whole)
  losses = [row["loss"] for row in rows if "loss" in row]
  assert len(losses) == 12 and losses[-1] < losses[0] - 1
  evaluated = [row for row in rows if "validation_loss" in row]
  assert [row["step"] for row in evaluated] == [6, 12]
  assert evaluated[-1]["validation_bits_per_byte"] < evaluated[0]["validation_bits_per_byte"]
  assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == ["12", "8"]
  assert list((whole / "tensorboard").iterdir())


def test_sigterm_saves_at_once_and_goes_on_exactly(corpus, whole, tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    stop_at(patch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(PreemptionError, match="after step 6"):
      train_on(corpus, tiny(), tmp_path / "run")
  assert (tmp_path / "run/checkpoints/6").exists()
  # Told to stop it saves and does not evaluate first; that is done when it goes on.
  assert not any("validation_loss" in row for row in numbers(tmp_path / "run"))
  train_on(corpus, tiny(), tmp_path / "run")
  assert_same(tmp_path / "run", whole)


@pytest.mark.parametrize(
  "how",
  [*(pytest.param(x, marks=pytest.mark.slow) for x in ("truncated", "deleted")), "flipped"],
)
def test_interrupted_then_damaged(corpus, whole, tmp_path, monkeypatch, how):
  workdir = tmp_path / "run"
  with monkeypatch.context() as patch:
    stop_at(patch, 10, interrupt)
    with pytest.raises(KeyboardInterrupt):
      train_on(corpus, tiny(), workdir)
  damage(workdir, 8, how)
  said = []
  train_on(corpus, tiny(), workdir, report=said.append)
  assert "checkpoint 8 is damaged" in said[0] and "resuming from step 4" in said[1]
  assert (workdir / "damaged/8").exists()
  assert_same(workdir, whole)


def test_every_checkpoint_damaged(whole, corpus, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(whole, workdir)
  for step in (8, 12):
    damage(workdir, step, "deleted")
  rows = (workdir / "metrics.jsonl").read_bytes()
  for _ in range(2):  # told once is not told to start again
    with pytest.raises(ValueError, match=r"every checkpoint in .* was damaged .* --from_scratch"):
      train_on(corpus, tiny(), workdir)
  assert (workdir / "metrics.jsonl").read_bytes() == rows
  train_on(corpus, tiny(), workdir, from_scratch=True)
  assert_same(workdir, whole)
  assert (workdir / "metrics.1.jsonl").read_bytes() == rows
  assert sorted(p.name for p in (workdir / "damaged").iterdir()) == ["12", "8"]
  assert (workdir / "tensorboard.1").exists()
  # From here it is a run like any other, also if the flag stays in the command.
  said = []
  train_on(corpus, tiny(), workdir, from_scratch=True, report=said.append)
  assert said == ["resuming from step 12 of 12"]


def test_divergence_keeps_the_weights(corpus, tmp_path):
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


def test_other_settings_are_refused_before_writing(corpus, whole, tmp_path):
  before = sorted(p.name for p in whole.rglob("*"))
  with pytest.raises(ValueError, match="seed = 0, now it is 1"):
    train_on(corpus, tiny(seed=1), whole)
  gla = preset("gla-tiny", vocab=260, depth=2, width=32, mlp_multiple=32)
  with pytest.raises(ValueError, match=r"mixers \['deltanet'\], now they are \['gla'\]"):
    train_on(corpus, tiny(model=gla), whole)
  assert sorted(p.name for p in whole.rglob("*")) == before
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
