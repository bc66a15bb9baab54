"""Reading checkpoints writes nothing and distinguishes damage from I/O errors."""

import errno
import shutil

import pytest

from deltanet_jax import files
from deltanet_jax.interop import save_fla
from deltanet_jax.train import check_start, checkpoint_reader, load_trained, save_weights
from tests.support.training import (
  damage,
  launch,
  numbers,
  tiny,
  train_on,
  train_words,
  wait_for_exit,
)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("stored") / "run"
  train_on(corpus, tiny(), workdir)
  return workdir


def contents(folder):
  return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_reading_a_training_run_in_progress(corpus, tmp_path):
  workdir, reads = tmp_path / "run", []
  more = ["--config.checkpoint.every=1", "--config.tokens=10240", "--config.eval_every=100"]
  process = launch(train_words(corpus, workdir, *more))
  while process.poll() is None:
    if checkpoint_reader.saved_steps(workdir):
      reads.append(load_trained(workdir, report=reads.append).step)
  wait_for_exit(process)
  assert reads == sorted(reads) and len(set(reads)) > 2, reads
  assert len([row for row in numbers(workdir) if "loss" in row]) == 40


def test_reading_writes_nothing(run):
  (run / "checkpoints/16.orbax-checkpoint-tmp").mkdir()  # a save in progress
  before = contents(run)
  load_trained(run)
  assert contents(run) == before
  (run / "checkpoints/16.orbax-checkpoint-tmp").rmdir()


def test_loading_a_step(run, tmp_path):
  assert load_trained(run, 8).step == 8 and load_trained(run).step == 12
  with pytest.raises(ValueError, match=r"has no checkpoint of step 3, only of \[8, 12\]"):
    load_trained(run, 3)
  save_weights(load_trained(run, 8), tmp_path / "weights")
  assert load_trained(tmp_path / "weights", 8).step == 8
  with pytest.raises(ValueError, match="holds the weights of step 8, not of step 12"):
    load_trained(tmp_path / "weights", 12)


@pytest.mark.parametrize("how", ["truncated", "deleted", "flipped"])
def test_a_damaged_checkpoint_is_skipped(run, tmp_path, how, capfd):
  workdir, reports = tmp_path / "run", []
  shutil.copytree(run, workdir)
  damage(workdir, 12, how)
  before = contents(workdir)
  assert load_trained(workdir, report=reports.append).step == 8
  assert len(reports) == 1 and "checkpoint 12" in reports[0] and "using 8 instead" in reports[0]
  with pytest.raises(ValueError, match=r"no intact checkpoint: 12 is damaged \("):
    load_trained(workdir, 12)
  damage(workdir, 8, "truncated")
  with pytest.raises(ValueError, match=r"8 is damaged \(a file is truncated\); 12 is damaged \("):
    load_trained(workdir)
  assert contents(workdir).keys() == before.keys()
  assert capfd.readouterr().err == ""


def test_a_damaged_export_raises(run, tmp_path, capfd):
  save_weights(load_trained(run), tmp_path / "out")
  files = [p for p in (tmp_path / "out/weights").rglob("*") if p.is_file()]
  largest = max(files, key=lambda p: p.stat().st_size)
  largest.write_bytes(largest.read_bytes()[:1000])
  with pytest.raises(ValueError, match=r"weights is damaged \(a file is truncated\): export it ag"):
    load_trained(tmp_path / "out")
  assert capfd.readouterr().err == ""


def test_no_checkpoint_yet_raises(run, tmp_path):
  shutil.copy(run / "config.json", tmp_path)
  with pytest.raises(ValueError, match="has no checkpoint yet"):
    load_trained(tmp_path)
  assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
  "error",
  [
    OSError(errno.EIO, "I/O error"),
    pytest.param(MemoryError("too much"), marks=pytest.mark.slow),
  ],
)
def test_an_io_error_moves_nothing(corpus, run, tmp_path, monkeypatch, error):
  workdir = tmp_path / "run"
  shutil.copytree(run, workdir)
  before = contents(workdir / "checkpoints")

  def fail(*_, **__):
    raise error

  with monkeypatch.context() as patch:
    patch.setattr(checkpoint_reader.ocp.Checkpointer, "restore", fail)
    for read in (lambda: train_on(corpus, tiny(), workdir), lambda: load_trained(workdir)):
      with pytest.raises(OSError, match=f"{error.args[-1]}.*nothing was changed"):
        read()
  assert contents(workdir / "checkpoints") == before and not (workdir / "damaged").exists()
  train_on(corpus, tiny(), workdir)


def test_a_folder_without_a_run_raises(run, tmp_path):
  trained = load_trained(run)
  save_weights(trained, tmp_path / "weights")
  save_fla(trained.model, tmp_path / "fla")
  with pytest.raises(ValueError, match="holds exported weights, not a run: name another workdir"):
    check_start(tiny(), tmp_path / "weights")
  for read in (load_trained, lambda folder: check_start(tiny(), folder)):
    with pytest.raises(ValueError, match="is not of a run: read a public checkpoint with load_"):
      read(tmp_path / "fla")
  (tmp_path / "file").touch()
  with pytest.raises(ValueError, match="is a file: name a folder"):
    check_start(tiny(), tmp_path / "file")


def test_exports_are_atomic(run, tmp_path, monkeypatch):
  def fail(_):
    raise OSError(errno.ENOSPC, "No space left on device")

  trained = load_trained(run)
  (tmp_path / "full").mkdir()
  (tmp_path / "full/notes.txt").write_text("mine")
  for save in (save_weights, lambda trained, folder: save_fla(trained.model, folder)):
    with pytest.raises(ValueError, match="is not empty: name a new folder"):
      save(trained, tmp_path / "full")
    with monkeypatch.context() as patch:
      patch.setattr(files, "sync", fail)
      with pytest.raises(OSError, match=r"new cannot be written \(No space left"):
        save(trained, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]
  assert [p.name for p in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_checkpoint_of_another_model_is_named(corpus, run, tmp_path):
  workdir = shutil.copytree(run, tmp_path / "run")
  config = (workdir / "config.json").read_text()
  before = contents(workdir / "checkpoints")
  changes = {
    ('"head_bias": false', '"head_bias": true'): r"for head.bias it has no such array, .* \(260,\)",
    ('"width": 32', '"width": 64'): r"for embedding it has shape \(260, 32\), .* shape \(260, 64\)",
  }
  for (old, new), difference in changes.items():
    assert old in config
    (workdir / "config.json").write_text(config.replace(old, new))
    with pytest.raises(ValueError, match=f"checkpoint of another model .* {difference}"):
      load_trained(workdir)
  cfg = tiny()
  cfg.model.width = 64
  with pytest.raises(ValueError, match="checkpoint of another model"):
    train_on(corpus, cfg, workdir)
  assert contents(workdir / "checkpoints") == before and not (workdir / "damaged").exists()


def test_no_checkpoint_left_raises(run, tmp_path):
  shutil.copy(run / "config.json", tmp_path)
  (tmp_path / "damaged/12").mkdir(parents=True)
  with pytest.raises(ValueError, match="no checkpoint left: all of them were damaged and moved to"):
    load_trained(tmp_path)
