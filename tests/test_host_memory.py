"""`keep_freed_memory`: a process reuses freed memory without new page faults."""

import platform
import subprocess
import sys

import pytest

# Page faults while filling 64 MiB of a second array, after the first was freed.
COUNT = """
import resource
import numpy as np
from deltanet_jax.host_memory import keep_freed_memory
if {keep}: assert keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.empty({size}, np.uint8)[: 2**26].fill(1)
before = faults()
np.empty({size}, np.uint8)[: 2**26].fill(1)
print(faults() - before)
"""


def faults(keep: bool, size: int) -> int:
  run = [sys.executable, "-c", COUNT.format(keep=keep, size=size)]
  return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is in glibc only")
@pytest.mark.parametrize("size", [2**26, 3 * 2**30])  # glibc's thresholds end at 2^31
def test_freed_memory_is_reused(size):
  # NumPy requests huge pages, so even few faults are many bytes.
  assert faults(keep=True, size=size) == 0 < faults(keep=False, size=size)
