"""Memory that a process freed is used again."""

import platform
import subprocess
import sys

import pytest

# Page faults of the second of two arrays of 64 MiB, the first freed before.
COUNT = """
import resource
import numpy as np
from deltanet_jax.host_memory import keep_freed_memory
if {keep}: assert keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.empty(2**26, np.uint8).fill(1)
before = faults()
np.empty(2**26, np.uint8).fill(1)
print(faults() - before)
"""


def faults(keep: bool) -> int:
  run = [sys.executable, "-c", COUNT.format(keep=keep)]
  return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_memory_is_kept():
  # NumPy asks for huge pages, so few faults are many bytes.
  assert faults(keep=True) == 0 < faults(keep=False)
