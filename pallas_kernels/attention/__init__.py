"""Causal softmax attention by kernels of our own for TPU and GPU, with derivatives of any order."""

import importlib

# Imported when they are asked for: the checks are of use without Pallas.
_MODULES = {"attention_tpu": "tpu", "attention_gpu": "gpu"}
__all__ = list(_MODULES)


def __getattr__(name):
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__():
  return [*globals(), *__all__]
