"""One run at a time in a folder."""

import contextlib
import fcntl
import os
import pathlib
import socket

FILE = "lock"


@contextlib.contextmanager
def locked(workdir: pathlib.Path, say=print):
  """Holds workdir/lock; raises ValueError if another process does, on any host where disks tell.

  The system lets go of it when its process ends in whatever way; readers do not ask for it.
  """
  path = workdir / FILE
  with path.open("a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      holder = file.read().strip() or "another process"
      raise ValueError(
        f"{workdir} is in use by {holder}: wait until it ends, or name another workdir."
      ) from None
    except OSError as e:
      say(f"{path} cannot be locked ({e.strerror}): see to it that no other run uses this workdir.")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    yield
