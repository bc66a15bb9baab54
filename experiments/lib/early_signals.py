"""Signal handlers for the time of imports; commands import this module first.

SIGTERM and Ctrl-C exit at once with their exit codes, also during imports. `train` replaces the
handlers by its own, which save a checkpoint; `app.run` resets them in commands that do not train.
"""

import atexit
import os
import signal
import sys

from experiments.lib.exit_codes import INTERRUPTED, PREEMPTED

_CODES = {signal.SIGTERM: PREEMPTED, signal.SIGINT: INTERRUPTED}


def _exit(number, _):
  # Raising an exception is no option, because an import or a callback could swallow it; nor is
  # Python's stderr, whose buffer may be in use.
  os.write(2, f"\nstopped by {signal.Signals(number).name}\n".encode())
  os._exit(_CODES[number])


_started = sys.modules["__main__"].__spec__
# Only in a command: a test that imports one keeps the handlers of pytest.
if _started is not None and _started.name.startswith("experiments."):
  for _number in _CODES:
    # Shells let background jobs ignore Ctrl-C: keep that.
    if signal.getsignal(_number) is not signal.SIG_IGN:
      signal.signal(_number, _exit)
  # Python removes its handlers during shutdown; by then the command is complete.
  atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
