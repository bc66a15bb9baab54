"""Many processes as one program: SLURM, a TPU pod, or an address and a rank given by hand."""

import jax
from absl import flags
from jax.experimental import multihost_utils

_MULTIHOST = flags.DEFINE_bool(
  "multihost", False, "One of several processes of a SLURM job or a TPU pod, found by itself."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port of process 0, the same for all; instead of --multihost."
)
_PROCESSES = flags.DEFINE_integer("processes", None, "How many there are, with --coordinator.")
_RANK = flags.DEFINE_integer("rank", None, "Which of them this is, from 0, with --coordinator.")


def join():
  """Connects this process to the others, before jax is used; alone it does nothing."""
  by_hand = (_COORDINATOR.value, _PROCESSES.value, _RANK.value)
  if any(x is not None for x in by_hand):
    if None in by_hand or _MULTIHOST.value:
      raise ValueError(
        "--coordinator, --processes and --rank belong together, without --multihost."
      )
    jax.distributed.initialize(*by_hand)
  elif _MULTIHOST.value:
    jax.distributed.initialize()


def wait_for_all(name: str):
  """Returns when every process has come here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def report(line: str):
  """Prints from the first process only."""
  if jax.process_index() == 0:
    print(line, flush=True)
