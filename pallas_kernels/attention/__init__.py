"""Causal softmax attention by the kernels that jax ships, differentiable to any order."""

import importlib

# Imported when they are asked for: the checks are of use without Pallas.
_MODULES = {"attention_tpu": "splash", "attention_gpu": "triton"}
__all__ = list(_MODULES)


def __getattr__(name):
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__():
  return [*globals(), *__all__]
