"""Preemption and signal handling: SIGTERM from a scheduler, Ctrl-C from a user."""

import concurrent.futures
import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils


class PreemptionError(Exception):
  """The run was stopped by SIGTERM; a checkpoint of the last update was saved."""


class Stop:
  """Context manager that handles SIGTERM, to any process of the run, and Ctrl-C.

  A second Ctrl-C calls the previous handler, which stops at once. Outside the main thread Python
  delivers no signals, so nothing is handled there.
  """

  def __init__(self, workdir: pathlib.Path):
    self._workdir = workdir
    self._previous = {}
    self._signal = None
    # With several processes the coordination service takes SIGTERM and makes all stop at one step.
    self._single_process = not jax.distributed.is_initialized() or jax.process_count() == 1

  def __enter__(self):
    if self._single_process and threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        # A shell makes its background jobs ignore Ctrl-C.
        if signal.getsignal(number) is not signal.SIG_IGN:
          self._previous[number] = signal.signal(number, self._ask)
    return self

  def _ask(self, number, frame):
    if number == signal.SIGINT == self._signal and callable(previous := self._previous[number]):
      previous(number, frame)
    self._signal = number

  def asked(self, step: int) -> bool:
    """Whether to stop after this update; the same in all processes."""
    if self._single_process:
      return self._signal is not None
    return multihost_utils.reached_preemption_sync_point(step)

  def leave(self, step: int):
    """Raise PreemptionError or KeyboardInterrupt, after a checkpoint of `step` was saved."""
    self._leave(f"after step {step}, saved in {self._workdir}")

  def _leave(self, when):
    if self._signal == signal.SIGINT:
      raise KeyboardInterrupt(f"stopped by Ctrl-C {when}; run the same command to resume.")
    raise PreemptionError(f"stopped by SIGTERM {when}.")

  def before_start(self, work: Callable[[], Any]) -> Any:
    """Return `work()`, which runs before the first update; raise at once on a signal.

    It runs in a thread, because Python handles no signal during a compilation. It must not trace:
    JAX settings may be thread-local. On a signal there is nothing to save yet; the thread
    runs to its end, because a compiler that outlives the interpreter aborts the process.
    """
    if not self._previous:
      return work()
    future = concurrent.futures.Future()

    def run():
      try:
        future.set_result(work())
      except BaseException as e:
        future.set_exception(e)

    if self._signal is None:
      threading.Thread(target=run).start()
    while not future.done() and self._signal is None:
      concurrent.futures.wait([future], timeout=0.1)
    if self._signal is not None:
      self._leave(f"before the first update, {self._workdir} is unchanged")
    return future.result()

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      signal.signal(number, handler)
