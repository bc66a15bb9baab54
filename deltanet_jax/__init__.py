"""The delta rule and DeltaNet-style models in JAX.

The names most people want, each imported when it is asked for. Training is `deltanet_jax.train`,
generation `deltanet_jax.generate`.
"""

import importlib

_WHERE = {
  "build": "models",
  "delta_rule": "ops",
  "delta_rule_step": "ops",
  "load_fla": "interop",
  "load_trained": "train",
  "preset": "models",
}

__all__ = list(_WHERE)


def __getattr__(name: str):
  if name not in _WHERE:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__():
  return sorted({*globals(), *_WHERE})
