"""Imported first by commands that train: SIGTERM and Ctrl-C have their exit codes at once.

`train` listens itself, and saves; this is for before and after it, when there is nothing to save.
"""

import atexit
import os
import signal

from experiments.lib.exit_codes import INTERRUPTED, PREEMPTED

_CODES = {signal.SIGTERM: PREEMPTED, signal.SIGINT: INTERRUPTED}


def _leave(number, _):
  # Not by an exception, which an import or a callback could swallow; and without Python's buffers,
  # which may be in use just now.
  os.write(2, f"\nstopped by {signal.Signals(number).name}\n".encode())
  os._exit(_CODES[number])


for _number in _CODES:
  # A shell has its background jobs ignore Ctrl-C.
  if signal.getsignal(_number) is not signal.SIG_IGN:
    signal.signal(_number, _leave)
# While Python shuts down there are no handlers: what the command had to do is done.
atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
