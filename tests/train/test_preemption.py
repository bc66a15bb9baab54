"""SIGTERM and Ctrl-C at any time, their exit codes, and the lock of a workdir."""

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
from tests.support.training import (
  launch,
  numbers,
  stop_at,
  tiny,
  train_on,
  train_words,
  wait_for_exit,
)

LONG = ["--config.tokens=256000", "--config.eval_every=1000", "--config.checkpoint.every=1000"]


def has_started(process) -> bool:
  """Whether the command has installed its signal handler, at its first import."""
  status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
  return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_sigterm_at_any_time_exits_with_75(corpus, tmp_path):
  cache, last_lines = tmp_path / "cache", []
  # During imports, compilation and the loop; the test below covers every phase of `train`.
  for delay in (0.0, 1.0, 2.5, 4.0, 6.0):
    process = launch(train_words(corpus, tmp_path / "run", *LONG), cache=cache)
    while not has_started(process):
      time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    output = wait_for_exit(process, PREEMPTED)
    assert "Traceback" not in output, output
    last_lines.append(output.splitlines()[-1])
  assert "stopped by SIGTERM" in last_lines[0], last_lines


@pytest.mark.parametrize("moment", ["make_trainer", "Checkpoints", "Meter", "open_loggers"])
def test_sigterm_before_the_first_update(corpus, tmp_path, monkeypatch, moment):
  """In `train` itself, which handles signals from its first line to its last."""
  before, inner = signal.getsignal(signal.SIGTERM), getattr(loop, moment)

  def hooked(*args, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    return inner(*args, **options)

  with monkeypatch.context() as patch:
    patch.setattr(loop, moment, hooked)
    with pytest.raises(PreemptionError, match=r"before the first update|after step 1,"):
      train_on(corpus, tiny(), tmp_path / "run")
  assert signal.getsignal(signal.SIGTERM) is before
  assert saved_steps(tmp_path / "run") == ([1] if moment == "open_loggers" else [])


@pytest.fixture
def terminal():
  """As in a terminal: a background process, as this one may be, ignores Ctrl-C."""
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
  with pytest.raises(KeyboardInterrupt) as error:
    train_on(corpus, tiny(), tmp_path / "run")
  assert not str(error.value) and load_trained(tmp_path / "run").step == 4


def test_ctrl_c_of_the_command(corpus, tmp_path):
  often = [word for word in LONG if "every" not in word]
  # As in a terminal: a process in the background ignores Ctrl-C.
  terminal = ["env", "--default-signal=INT"]
  process = launch(train_words(corpus, tmp_path / "run", *often), by=terminal)
  while not saved_steps(tmp_path / "run"):
    time.sleep(0.01)
  process.send_signal(signal.SIGINT)
  output = wait_for_exit(process, INTERRUPTED)
  step = int(re.search(r"stopped by Ctrl-C after step (\d+), saved in", output)[1])
  assert load_trained(tmp_path / "run").step == step and "Traceback" not in output


def test_outside_the_main_thread(corpus, tmp_path):
  results = []
  work = lambda: results.append(train_on(corpus, tiny(), tmp_path / "run"))
  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert results and len(numbers(tmp_path / "run")) == 14


def test_a_workdir_in_use_raises(corpus, tmp_path):
  workdir = tmp_path / "run"
  first = launch(train_words(corpus, workdir, *LONG))
  while not (workdir / "metrics.jsonl").exists():
    time.sleep(0.01)
  with pytest.raises(ValueError, match=rf"is in use by process {first.pid} on .*: wait until it"):
    train_on(corpus, tiny(tokens=256000), workdir)
  output = wait_for_exit(launch(train_words(corpus, workdir, *LONG)), 1)
  assert output.splitlines()[-1].startswith(f"train: {workdir} is in use by process {first.pid}")
  first.kill()
  first.communicate()
  with locked(workdir / "lock"):  # a killed process releases its lock
    pass


def test_a_filesystem_without_locks_is_reported(tmp_path, monkeypatch):
  def unsupported(*_):
    raise OSError(95, "Operation not supported")

  reports = []
  monkeypatch.setattr("fcntl.flock", unsupported)
  with locked(tmp_path / "lock", report=reports.append):
    assert "cannot be locked (Operation not supported)" in reports[0]


@pytest.mark.parametrize("disk", ["read-only", "full"])
def test_an_unwritable_disk_is_one_message(corpus, tmp_path, disk):
  options = {"read-only": "ro,size=1m", "full": "size=400k"}[disk]
  mount = f"mount -t tmpfs -o {options} none {tmp_path}"
  if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
    pytest.skip("needs user namespaces, to mount a small disk")
  # Frequent checkpoints fill the disk during a save: its other writes fail afterwards.
  words = train_words(corpus, tmp_path / "run", LONG[1], "--config.checkpoint.every=2")
  process = launch(words, by=["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"])
  output = wait_for_exit(process, 1)
  assert "Traceback" not in output, output
  # JAX may log before it, a thread of orbax after it.
  (message,) = [line for line in output.splitlines() if line.startswith("train: ")]
  assert "cannot be written" in message or "could not be written" in message
