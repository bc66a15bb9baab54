"""Stop orbax from printing tracebacks of errors that it also raises to its caller.

One failed read or write makes orbax print hundreds of lines: its other reads and writes are still
in flight, and end after the event loop that waited for them is closed
(https://github.com/google/orbax/issues/605). asyncio then reports their callbacks and the
unretrieved exceptions when they are garbage collected
(https://github.com/python/cpython/pull/27688). Needed as of orbax-checkpoint 0.12.8 and Python
3.11. Nothing here changes which errors are raised.
"""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable

_LOCK = threading.Lock()  # hooks of the interpreter are replaced by one thread at a time
_CALLBACK = asyncio.BaseEventLoop.call_soon_threadsafe.__code__


def _from_orbax(trace) -> bool:
  """Whether an exception was raised in orbax, or in its callback to a closed event loop."""
  code = trace.tb_frame.f_code if trace is not None else None
  return code is not None and (code is _CALLBACK or "orbax" in code.co_filename)


def _is_not_orbax_error(record: logging.LogRecord) -> bool:
  """Logging filter that drops errors logged by orbax or left in one of its tasks."""
  trace = record.exc_info[2] if record.exc_info else None
  return record.levelno < logging.ERROR or not ("orbax" in record.pathname or _from_orbax(trace))


@dataclasses.dataclass(frozen=True)
class _UnraisableHook:
  """`sys.unraisablehook` that ignores exceptions of orbax."""

  previous: Callable

  def __call__(self, unraisable):
    if not _from_orbax(unraisable.exc_traceback):
      self.previous(unraisable)


def silence_background_errors():
  """Drop tracebacks of orbax's background threads, for the rest of the process."""
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_not_orbax_error)  # adding it twice has no effect
  _ignore_pending_coroutines()
  if not isinstance(sys.unraisablehook, _UnraisableHook):
    sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


def _ignore_pending_coroutines():
  """Ignore the warning for writes and reads that orbax did not start before the first error."""
  pending = "coroutine '(async_serialize|_read_array_index).*was never awaited"
  warnings.filterwarnings("ignore", pending, RuntimeWarning)


@contextlib.contextmanager
def silenced():
  """Drop everything that hooks and asyncio print while a checkpoint is read or exported."""
  log, ignore = logging.getLogger("asyncio"), lambda *_: None
  _ignore_pending_coroutines()
  with _LOCK:
    before = sys.excepthook, sys.unraisablehook, log.level
    sys.excepthook = sys.unraisablehook = ignore
    log.setLevel(logging.CRITICAL + 1)
    try:
      yield
    except BaseException:
      # Pending reads end soon; asyncio reports their exceptions at garbage collection.
      time.sleep(0.2)
      gc.collect()
      raise
    finally:
      sys.excepthook, sys.unraisablehook, level = before
      log.setLevel(level)
