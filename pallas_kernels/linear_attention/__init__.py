"""Linear attention as kernels: those of the delta rule, without what they erase."""

import importlib

# Imported when they are asked for, as those of the delta rule.
_MODULES = {
  "linear_attention_gpu": "pallas_gpu.vjp",
  "linear_attention_step_gpu": "pallas_gpu.step",
  "linear_attention_tpu": "pallas_tpu.vjp",
  "linear_attention_step_tpu": "pallas_tpu.step",
}
__all__ = list(_MODULES)


def __getattr__(name):
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"pallas_kernels.delta_rule.{_MODULES[name]}"), name)


def __dir__():
  return [*globals(), *__all__]
