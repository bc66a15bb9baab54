"""How this process gets memory from the system."""

import ctypes
import platform

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
  """Lets the process keep the memory that it frees, where its C library is glibc; else False.

  By default arrays of over 32 MiB go back to the system when they are freed, and every page of the
  next ones is fetched and zeroed again: on a CPU a third of a training step (BUILD_NOTES.md). The
  process then holds the most that it ever needed.
  """
  if platform.libc_ver()[0] != "glibc":
    return False
  mallopt = ctypes.CDLL(None).mallopt
  # One arena: what one thread frees serves all others.
  values = {_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: _LARGEST, _ARENA_MAX: 1}
  return all([mallopt(name, value) == 1 for name, value in values.items()])
