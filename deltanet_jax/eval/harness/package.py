"""The package of the harness, if it is installed; quiet, and without a search for the network."""

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import types


def load(module: str) -> types.ModuleType:
  """A module of the harness, or an ImportError that says what to install."""
  if importlib.util.find_spec("lm_eval") is None:
    raise ImportError(
      "Tasks of lm-evaluation-harness need the package lm-eval: install it with"
      ' `pip install "deltanet-jax[eval]"`.'
    )
  os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
  found = importlib.import_module(module)
  # It tells of every setting that it takes by default.
  for name in ("lm_eval", "datasets", "huggingface_hub"):
    logging.getLogger(name).setLevel(logging.ERROR)
  return found


def versions() -> dict[str, str]:
  """Of what decides a result beside the model."""
  return {name: importlib.metadata.version(name) for name in ("lm_eval", "datasets")}
