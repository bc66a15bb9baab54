"""Data sets of the hub: whether it can be reached is found out once, and told in seconds."""

import contextlib
import functools
from collections.abc import Iterator

from deltanet_jax.eval.harness import package

_SECONDS = 10.0


@functools.cache
def reachable() -> str | None:
  """None if the hub answers, else why it does not."""
  hub, constants = package.load("huggingface_hub"), package.load("huggingface_hub.constants")
  if constants.HF_HUB_OFFLINE:
    return "HF_HUB_OFFLINE is set"
  try:
    # One question without a second try; any answer will do.
    hub.get_session().head(constants.ENDPOINT, timeout=_SECONDS)
  except Exception as e:  # of whichever library asks
    return f"{type(e).__name__}: {e}".splitlines()[0][:120]
  return None


@contextlib.contextmanager
def in_seconds(task: str) -> Iterator[None]:
  """Inside, data come from the hub, or from its cache where it does not answer.

  What is in neither is an error at once: left to themselves the libraries would ask for minutes.
  """
  problem = reachable()
  switches = [package.load("huggingface_hub.constants"), package.load("datasets").config]
  before = [module.HF_HUB_OFFLINE for module in switches]
  for module in switches:
    module.HF_HUB_OFFLINE = module.HF_HUB_OFFLINE or problem is not None
  try:
    yield
  except Exception as e:  # of datasets, the hub, or the task whose data are not there
    told = f"{type(e).__name__}: {e}".splitlines()[0][:160]
    why = f"the hub does not answer ({problem})" if problem else told
    raise ValueError(
      f"the data of the task {task} cannot be had: {why}, and the cache has no copy; load them"
      " where there is a network, or give files by --local_data."
    ) from e
  finally:
    for module, value in zip(switches, before):
      module.HF_HUB_OFFLINE = value
