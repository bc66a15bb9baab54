"""Host memory: how much is available, and allocator settings (glibc malloc)."""

import ctypes
import pathlib
import platform

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1  # disables a threshold


def available_memory() -> int | None:
  """Return the bytes that this process may still allocate: RAM, swap and the control group's limit.

  None if the operating system is not Linux.
  """
  try:
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
  except OSError:
    return None
  sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines)}
  available = sizes["MemAvailable"] + sizes.get("SwapFree", 0)
  limit, used = (_read_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
  if limit is None or used is None:
    return available
  stat = pathlib.Path("/sys/fs/cgroup/memory.stat")
  # The kernel drops file pages before it enforces the limit.
  cached = next((int(x.split()[1]) for x in _lines(stat) if x.startswith("inactive_file ")), 0)
  return min(available, limit - used + cached)


def _read_number(path: str) -> int | None:
  """Return the number in a file; None if there is no such file or no number ("max")."""
  line = next(iter(_lines(pathlib.Path(path))), "")
  return int(line) if line.isdigit() else None


def _lines(path: pathlib.Path) -> list[str]:
  return path.read_text().splitlines() if path.is_file() else []


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
