"""Run commands as subprocesses, several at a time; each writes its output to a log file."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence

from experiments.lib.exit_codes import INTERRUPTED, PREEMPTED

_POLL = 0.1  # seconds
_STOP = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: PREEMPTED}


@dataclasses.dataclass(frozen=True)
class Job:
  """A command, by the name that messages use, and the file for its output."""

  name: str
  command: Sequence[str]
  log: pathlib.Path

  def last_line(self) -> str:
    """The last line of output, without progress bars."""
    lines = self.log.read_text(errors="replace").replace("\r", "\n").strip().splitlines()
    return lines[-1].strip() if lines else ""


@dataclasses.dataclass
class _Running:
  job: Job
  process: subprocess.Popen
  slot: int
  start: float


class StoppedError(Exception):
  """The pool was stopped by a signal; `code` is the exit code for it."""

  def __init__(self, message: str, code: int):
    super().__init__(message)
    self.code = code


def run(
  jobs: Sequence[Job], at_once: int, done: Callable[[Job, int, float], None]
) -> dict[str, int]:
  """Run all jobs, at most `at_once` at a time; return the exit codes by name.

  A job that fails does not stop the others. SIGINT and SIGTERM are passed on to the running jobs,
  once each time they arrive: jobs run in sessions of their own, so that Ctrl-C in a terminal does
  not reach them twice. With `CUDA_VISIBLE_DEVICES=0,1,...`, each running job has one of the GPUs.

  Args:
    done: called with a job, its exit code and its seconds when it has ended.

  Raises:
    StoppedError: after a signal, when all running jobs have ended.
    ValueError: `CUDA_VISIBLE_DEVICES` names fewer devices than `at_once`.
  """
  devices = _devices(at_once)
  running: list[_Running] = []
  codes: dict[str, int] = {}
  with _forwarding(running) as received:
    waiting = list(jobs)
    while running or (waiting and not received):
      while waiting and len(running) < at_once and not received:
        slot = min(set(range(at_once)) - {one.slot for one in running})
        running.append(_start(waiting.pop(0), slot, devices))
      for one in [x for x in running if x.process.poll() is not None]:
        running.remove(one)
        codes[one.job.name] = one.process.returncode
        done(one.job, one.process.returncode, time.perf_counter() - one.start)
      time.sleep(_POLL)
    if received:
      name = signal.Signals(received[0]).name
      raise StoppedError(
        f"stopped by {name} with {len(waiting)} rows not started; the same command resumes.",
        _STOP[received[0]],
      )
  return codes


def _devices(at_once: int) -> list[str] | None:
  named = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
  if named and len(named) < at_once:
    raise ValueError(
      f"CUDA_VISIBLE_DEVICES names {len(named)} devices, fewer than --jobs={at_once}: each job"
      " needs one of its own."
    )
  return named or None


def _start(job: Job, slot: int, devices: list[str] | None) -> _Running:
  job.log.parent.mkdir(parents=True, exist_ok=True)
  environment = dict(os.environ) | (dict(CUDA_VISIBLE_DEVICES=devices[slot]) if devices else {})
  with open(job.log, "w") as log:
    process = subprocess.Popen(
      job.command,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  return _Running(job, process, slot, time.perf_counter())


@contextlib.contextmanager
def _forwarding(running: list[_Running]) -> Iterator[list[int]]:
  """Pass signals on to the running jobs; yields the list of those received so far."""
  received: list[int] = []

  def forward(number, _):
    received.append(number)
    for one in running:
      one.process.send_signal(number)

  before = {number: signal.signal(number, forward) for number in _STOP}
  try:
    yield received
  except BaseException:
    for one in running:  # no job outlives its pool
      one.process.terminate()
    raise
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
