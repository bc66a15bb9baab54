"""Multi-process training: connect processes (SLURM, TPU pod, coordinator address), barrier, log."""

import jax
from absl import flags
from jax.experimental import multihost_utils

_MULTIHOST = flags.DEFINE_bool(
  "multihost", False, "This is one process of a SLURM job or a TPU pod; jax detects the others."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of process 0, the same for all; instead of --multihost."
)
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes, with --coordinator.")
_RANK = flags.DEFINE_integer("rank", None, "Index of this process from 0, with --coordinator.")


def join():
  """Call jax.distributed.initialize as the flags say, before jax is used; no-op without flags."""
  explicit = (_COORDINATOR.value, _PROCESSES.value, _RANK.value)
  if any(x is not None for x in explicit):
    if None in explicit or _MULTIHOST.value:
      raise ValueError(
        "--coordinator, --processes and --rank must be given together, without --multihost."
      )
    jax.distributed.initialize(*explicit)
  elif _MULTIHOST.value:
    jax.distributed.initialize()


def wait_for_all(name: str):
  """Barrier: return when all processes have called it."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def report(line: str):
  """Print from process 0 only."""
  if jax.process_index() == 0:
    print(line, flush=True)
