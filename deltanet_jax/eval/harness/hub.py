"""Datasets of the Hugging Face Hub: fail within seconds if the hub is unreachable."""

import contextlib
import functools
from collections.abc import Iterator

from deltanet_jax.eval.harness import package

_SECONDS = 10.0


@functools.cache
def unreachable_reason() -> str | None:
  """Return why the hub cannot be reached; None if it answers."""
  hub, constants = package.load("huggingface_hub"), package.load("huggingface_hub.constants")
  if constants.HF_HUB_OFFLINE:
    return "HF_HUB_OFFLINE is set"
  try:
    # One request without retries; any response will do.
    hub.get_session().head(constants.ENDPOINT, timeout=_SECONDS)
  except Exception as e:  # of any HTTP library
    return f"{type(e).__name__}: {e}".splitlines()[0][:120]
  return None


@contextlib.contextmanager
def offline_if_unreachable(task: str) -> Iterator[None]:
  """Load data from the hub, or only from its local cache if the hub is unreachable.

  Data in neither raise ValueError at once; the libraries alone would retry for minutes.
  """
  problem = unreachable_reason()
  switches = [package.load("huggingface_hub.constants"), package.load("datasets").config]
  before = [module.HF_HUB_OFFLINE for module in switches]
  for module in switches:
    module.HF_HUB_OFFLINE = module.HF_HUB_OFFLINE or problem is not None
  try:
    yield
  except Exception as e:  # of datasets, the hub, or the task
    message = f"{type(e).__name__}: {e}".splitlines()[0][:160]
    why = f"the hub does not answer ({problem})" if problem else message
    raise ValueError(
      f"the data of the task {task} are unavailable: {why}, and the cache has no copy; download"
      " them where there is a network, or give files by --local_data."
    ) from e
  finally:
    for module, value in zip(switches, before):
      module.HF_HUB_OFFLINE = value
