"""Several processes that go the same way, whichever of them met an error."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from deltanet_jax.train.checkpoint_reader import DamageError


def raise_together(problem: Exception | None, what: str):
  """Raises the error of this process, or of another; `what` was read. None where all went well."""
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
  """Whether all processes have this number, of 31 bits."""
  if jax.process_count() == 1:
    return True
  return len(np.unique(multihost_utils.process_allgather(np.int32(number)))) == 1
