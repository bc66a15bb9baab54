"""Being told to stop: SIGTERM from a scheduler, Ctrl-C from a person."""

import concurrent.futures
import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import multihost_utils


class PreemptionError(Exception):
  """Asked to stop (SIGTERM); everything was saved."""


class Stop:
  """Whether this run was told to stop: by SIGTERM to any of its processes, or by Ctrl-C.

  A second Ctrl-C does what it would have done without this. Outside the main thread, where Python
  takes no signals, nobody can tell.
  """

  def __init__(self, workdir: pathlib.Path):
    self._workdir = workdir
    self._before = {}
    self._signal = None
    # Of several processes the coordination service hears it, and tells all the same step.
    self._alone = not jax.distributed.is_initialized() or jax.process_count() == 1

  def __enter__(self):
    if self._alone and threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        # A shell has its background jobs ignore Ctrl-C.
        if signal.getsignal(number) is not signal.SIG_IGN:
          self._before[number] = signal.signal(number, self._ask)
    return self

  def _ask(self, number, frame):
    if number == signal.SIGINT == self._signal and callable(before := self._before[number]):
      before(number, frame)
    self._signal = number

  def asked(self, step: int) -> bool:
    if self._alone:
      return self._signal is not None
    return multihost_utils.reached_preemption_sync_point(step)

  def leave(self, step: int):
    """Raises what the caller of a stopped run gets: all up to `step` is saved."""
    self._leave(f"after step {step}, saved in {self._workdir}")

  def _leave(self, when):
    if self._signal == signal.SIGINT:
      raise KeyboardInterrupt(f"stopped by Ctrl-C {when}; started again it goes on from there.")
    raise PreemptionError(f"stopped by SIGTERM {when}.")

  def before_start(self, work: Callable[[], Any]) -> Any:
    """The result of work that comes before the first update; left alone if told to stop.

    In a thread, for Python takes no signal while a compiler runs; so nothing that is traced, for
    settings of jax may be of one thread. There is nothing to save yet. The work goes on to its end,
    which Python awaits before it exits: a compiler that loses its Python aborts the process.
    """
    if not self._before:
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
      self._leave(f"before the first update, {self._workdir} is as it was")
    return future.result()

  def __exit__(self, *_):
    for number, handler in self._before.items():
      signal.signal(number, handler)
