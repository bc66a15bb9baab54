"""Import modules of lm-evaluation-harness, an optional dependency, without its log output."""

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import types


def load(module: str) -> types.ModuleType:
  """Import a module; raise ImportError with the install command if lm-eval is missing."""
  if importlib.util.find_spec("lm_eval") is None:
    raise ImportError(
      "Tasks of lm-evaluation-harness need the package lm-eval: install it with"
      ' `pip install "deltanet-jax[eval]"`.'
    )
  os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
  found = importlib.import_module(module)
  # It logs every default setting.
  for name in ("lm_eval", "datasets", "huggingface_hub"):
    logging.getLogger(name).setLevel(logging.ERROR)
  return found


def versions() -> dict[str, str]:
  """Return the versions of packages that affect results."""
  return {name: importlib.metadata.version(name) for name in ("lm_eval", "datasets")}
