"""What several processes of one program do together."""

import jax
from jax.experimental import multihost_utils


def wait_for_all(name: str):
  """Returns when every process has come here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def say(line: str):
  """Prints from the first process only."""
  if jax.process_index() == 0:
    print(line, flush=True)
