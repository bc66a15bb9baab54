"""Best times of several programs, measured in turn so that ratios compare the same minute."""

import time
from collections.abc import Callable, Hashable

import jax

_SHORT = 1.0  # seconds


def best_seconds(
  programs: dict[Hashable, Callable[[], object]], rounds: int, budget: float
) -> tuple[dict[Hashable, float], int]:
  """The shortest run of each program, and how many rounds over all of them there were.

  Args:
    budget: seconds after which no further round is begun; 0 is no limit.
  """
  best, done, begun = dict.fromkeys(programs, float("inf")), 0, time.perf_counter()
  while done < rounds and not (done and budget and time.perf_counter() - begun > budget):
    for name, run in programs.items():
      # What ran before leaves caches and allocator in its own state, which a short run feels.
      for _ in range(3 if best[name] < _SHORT else 1):
        # The result is dropped at once: one that is kept makes the next run take fresh memory.
        start = time.perf_counter()
        jax.block_until_ready(run())
        best[name] = min(best[name], time.perf_counter() - start)
    done += 1
  return best, done
