"""Host memory allocator settings (glibc malloc)."""

import ctypes
import platform

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1  # disables a threshold


def keep_freed_memory() -> bool:
  """Make malloc reuse freed memory instead of returning it to the operating system.

  By default glibc unmaps arrays above 32 MiB when they are freed, and every page of the next array
  faults and is zeroed again: a third of a training step on CPU (BUILD_NOTES.md). The process's
  resident memory then stays at its peak.

  Returns:
    Whether the settings were applied; False if the C library is not glibc.
  """
  if platform.libc_ver()[0] != "glibc":
    return False
  mallopt = ctypes.CDLL(None).mallopt
  # mmap is disabled: its threshold is an int (at most 2 GiB), and one update of a small model
  # allocates more. One arena, so that threads reuse each other's freed memory.
  values = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER, _ARENA_MAX: 1}
  return all([mallopt(name, value) == 1 for name, value in values.items()])
