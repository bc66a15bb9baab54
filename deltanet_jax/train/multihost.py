"""Agreement between processes: all raise an error if one of them meets it."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from deltanet_jax.train.checkpoint_reader import DamageError


def raise_together(problem: Exception | None, what: str):
  """Raise the error of this process or of another one; return if no process has one.

  Args:
    problem: the error of this process, None if it has none.
    what: was read, for the message.
  """
  if jax.process_count() > 1:
    kind = 0 if problem is None else 1 if isinstance(problem, DamageError) else 2
    worst = int(multihost_utils.process_allgather(np.int32(kind)).max())
    if worst == 2 and kind != 2:
      raise OSError(f"another process could not read its part of {what}; try again.")
    if worst == 1 and kind != 1:
      raise DamageError("another process found its part damaged")
  if problem is not None:
    raise problem


def same_everywhere(number: int) -> bool:
  """Whether all processes have the same number (at most 31 bits)."""
  if jax.process_count() == 1:
    return True
  return len(np.unique(multihost_utils.process_allgather(np.int32(number)))) == 1
