"""Best times of several programs, measured alternately so that ratios compare the same minute."""

import time
from collections.abc import Callable, Hashable

import jax

_SHORT = 1.0  # seconds


def best_seconds(
  programs: dict[Hashable, Callable[[], object]], rounds: int, budget: float
) -> tuple[dict[Hashable, float], int]:
  """Shortest time of each program, and the number of rounds.

  Args:
    budget: seconds after which no further round is started; 0: no limit.
  """
  best, done, started = dict.fromkeys(programs, float("inf")), 0, time.perf_counter()
  while done < rounds and not (done and budget and time.perf_counter() - started > budget):
    for name, run in programs.items():
      # A short run depends on the caches and allocator state that the previous program left.
      for _ in range(3 if best[name] < _SHORT else 1):
        # Drop the result at once: otherwise the next run has to allocate new memory.
        start = time.perf_counter()
        jax.block_until_ready(run())
        best[name] = min(best[name], time.perf_counter() - start)
    done += 1
  return best, done
