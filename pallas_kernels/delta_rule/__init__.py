"""The delta rule as kernels: differentiable over a sequence, and one decoding step."""

import importlib

# Imported when they are asked for: the checks are of use without Pallas, and Pallas without Triton.
_MODULES = {
  "delta_rule_tpu": "pallas_tpu.vjp",
  "delta_rule_gpu": "pallas_gpu.vjp",
  "delta_rule_triton": "ut.triton",
  "delta_rule_step_tpu": "pallas_tpu.step",
  "delta_rule_step_gpu": "pallas_gpu.step",
}
__all__ = list(_MODULES)


def __getattr__(name):
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__():
  return [*globals(), *__all__]
