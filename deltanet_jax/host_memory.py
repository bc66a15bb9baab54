"""How this process gets memory from the system."""

import ctypes
import platform

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1  # as a threshold


def keep_freed_memory() -> bool:
  """Lets the process keep the memory that it frees, where its C library is glibc; else False.

  By default arrays of over 32 MiB go back to the system when they are freed, and every page of the
  next ones is fetched and zeroed again: on a CPU a third of a training step (BUILD_NOTES.md). The
  process then holds the most that it ever needed.
  """
  if platform.libc_ver()[0] != "glibc":
    return False
  mallopt = ctypes.CDLL(None).mallopt
  # No mappings rather than a threshold for them, an int that ends at 2 GiB, which one update of a
  # small model passes. One arena: what one thread frees serves all others.
  values = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER, _ARENA_MAX: 1}
  return all([mallopt(name, value) == 1 for name, value in values.items()])
