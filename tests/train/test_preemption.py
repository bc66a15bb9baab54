"""Whoever is told to stop ends with its code, at any moment, and one trainer has a folder."""

import os
import pathlib
import re
import signal
import subprocess
import threading
import time

import pytest

from deltanet_jax.files import locked
from deltanet_jax.train import PreemptionError, load_trained, loop, saved_steps
from experiments.lib.exit_codes import INTERRUPTED, PREEMPTED
from tests.support.training import finish, launch, numbers, stop_at, tiny, train_on, train_words

LONG = ["--config.tokens=256000", "--config.eval_every=1000", "--config.checkpoint.every=1000"]


def has_started(process) -> bool:
  """Whether the command's own code runs: its first import takes the signal."""
  status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
  return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_sigterm_at_any_moment_is_75(corpus, tmp_path):
  cache, said = tmp_path / "cache", []
  # From the imports over compilation and restoring into the loop.
  for delay in (0.0, 0.5, 1.5, 2.5, 3.5, 4.5, 6.0, 8.0):
    process = launch(train_words(corpus, tmp_path / "run", *LONG), cache=cache)
    while not has_started(process):
      time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    said.append(finish(process, PREEMPTED).splitlines()[-1])
  assert "stopped by SIGTERM" in said[0], said
  assert all("Traceback" not in line for line in said), said


@pytest.mark.parametrize("moment", ["make_trainer", "Checkpoints", "Meter", "Log"])
def test_sigterm_before_the_first_update(corpus, tmp_path, monkeypatch, moment):
  """In `train` itself: its handler is there from the first line to the last."""
  before, inner = signal.getsignal(signal.SIGTERM), getattr(loop, moment)

  def hooked(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return inner(*args)

  with monkeypatch.context() as patch:
    patch.setattr(loop, moment, hooked)
    with pytest.raises(PreemptionError, match=r"before the first update|after step 1,"):
      train_on(corpus, tiny(), tmp_path / "run")
  assert signal.getsignal(signal.SIGTERM) is before
  assert saved_steps(tmp_path / "run") == ([1] if moment == "Log" else [])


@pytest.fixture
def terminal():
  """As in a terminal: a process in the background, as this one may be, ignores Ctrl-C."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_saves(corpus, tmp_path, monkeypatch):
  before = signal.getsignal(signal.SIGINT)
  stop_at(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
  with pytest.raises(KeyboardInterrupt, match=r"by Ctrl-C after step 6.*same command to resume"):
    train_on(corpus, tiny(), tmp_path / "run")
  assert signal.getsignal(signal.SIGINT) is before
  assert load_trained(tmp_path / "run").step == 6


@pytest.mark.usefixtures("terminal")
def test_a_second_ctrl_c_stops_at_once(corpus, tmp_path, monkeypatch):
  def twice():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)

  stop_at(monkeypatch, 6, twice)
  with pytest.raises(KeyboardInterrupt) as told:
    train_on(corpus, tiny(), tmp_path / "run")
  assert not str(told.value) and load_trained(tmp_path / "run").step == 4


def test_ctrl_c_in_the_command(corpus, tmp_path):
  often = [word for word in LONG if "every" not in word]
  # As in a terminal: a process in the background ignores Ctrl-C.
  terminal = ["env", "--default-signal=INT"]
  process = launch(train_words(corpus, tmp_path / "run", *often), by=terminal)
  while not saved_steps(tmp_path / "run"):
    time.sleep(0.01)
  process.send_signal(signal.SIGINT)
  output = finish(process, INTERRUPTED)
  step = int(re.search(r"stopped by Ctrl-C after step (\d+), saved in", output)[1])
  assert load_trained(tmp_path / "run").step == step and "Traceback" not in output


def test_outside_the_main_thread(corpus, tmp_path):
  results = []
  work = lambda: results.append(train_on(corpus, tiny(), tmp_path / "run"))
  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert results and len(numbers(tmp_path / "run")) == 14


def test_two_trainers_in_one_folder(corpus, tmp_path):
  workdir = tmp_path / "run"
  first = launch(train_words(corpus, workdir, *LONG))
  while not (workdir / "metrics.jsonl").exists():
    time.sleep(0.01)
  with pytest.raises(ValueError, match=rf"is in use by process {first.pid} on .*: wait until it"):
    train_on(corpus, tiny(tokens=256000), workdir)
  output = finish(launch(train_words(corpus, workdir, *LONG)), 1)
  assert output.splitlines()[-1].startswith(f"train: {workdir} is in use by process {first.pid}")
  first.kill()
  first.communicate()
  with locked(workdir / "lock"):  # what a killed process left does not count
    pass


def test_a_disk_without_locks_is_said(tmp_path, monkeypatch):
  def refuse(*_):
    raise OSError(95, "Operation not supported")

  said = []
  monkeypatch.setattr("fcntl.flock", refuse)
  with locked(tmp_path / "lock", report=said.append):
    assert "cannot be locked (Operation not supported)" in said[0]


@pytest.mark.parametrize("disk", ["read-only", "full"])
def test_a_disk_that_cannot_be_written_is_one_sentence(corpus, tmp_path, disk):
  options = {"read-only": "ro,size=1m", "full": "size=400k"}[disk]
  mount = f"mount -t tmpfs -o {options} none {tmp_path}"
  if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
    pytest.skip("needs user namespaces, to mount a small disk")
  # Saved so often that the disk is full in the midst of one: its other writes fail after it.
  words = train_words(corpus, tmp_path / "run", LONG[1], "--config.checkpoint.every=2")
  process = launch(words, by=["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"])
  output = finish(process, 1)
  # With CUDA wheels but no GPU jax has its own to say before.
  assert "Traceback" not in output, output
  # A thread of orbax's may still have a line after it.
  (said,) = [line for line in output.splitlines() if line.startswith("train: ")]
  assert "cannot be written" in said or "could not be written" in said
