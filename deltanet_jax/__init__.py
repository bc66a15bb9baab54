"""The delta rule and DeltaNet-style models in JAX.

The names that most users want, and every subpackage (`deltanet_jax.train`, `deltanet_jax.ops`),
imported on first access. Access without the extra that a name needs raises an error that names it.
"""

import importlib
from typing import TYPE_CHECKING

from deltanet_jax import _extras

if TYPE_CHECKING:  # what `__getattr__` imports, for type checkers and editors
  from deltanet_jax import chips as chips
  from deltanet_jax import config as config
  from deltanet_jax import data as data
  from deltanet_jax import device_batches as device_batches
  from deltanet_jax import eval as eval
  from deltanet_jax import files as files
  from deltanet_jax import generate as generate
  from deltanet_jax import host_memory as host_memory
  from deltanet_jax import interop as interop
  from deltanet_jax import mixers as mixers
  from deltanet_jax import models as models
  from deltanet_jax import object_storage as object_storage
  from deltanet_jax import ops as ops
  from deltanet_jax import plugins as plugins
  from deltanet_jax import sharding as sharding
  from deltanet_jax import train as train
  from deltanet_jax.interop import load_fla
  from deltanet_jax.models import build, preset
  from deltanet_jax.ops import delta_rule, delta_rule_step
  from deltanet_jax.train import load_trained, save_weights

__version__ = "0.2.0"  # pyproject.toml reads it from here

_NAMES = {
  "build": "models",
  "delta_rule": "ops",
  "delta_rule_step": "ops",
  "load_fla": "interop",
  "load_trained": "train",
  "preset": "models",
  "save_weights": "train",
}
_SUBMODULES = (
  "chips",
  "config",
  "data",
  "device_batches",
  "eval",
  "files",
  "generate",
  "host_memory",
  "interop",
  "mixers",
  "models",
  "object_storage",
  "ops",
  "plugins",
  "sharding",
  "train",
)

__all__ = [  # without the subpackages: `eval` would replace Python's function
  "__version__",
  "build",
  "delta_rule",
  "delta_rule_step",
  "load_fla",
  "load_trained",
  "preset",
  "save_weights",
]


def _load(name: str):
  """Import a name of `_NAMES` or `_SUBMODULES`; any error of the import is raised."""
  module = importlib.import_module(f"{__name__}.{_NAMES.get(name, name)}")
  return getattr(module, name) if name in _NAMES else module


def __getattr__(name: str):
  if name not in _NAMES and name not in _SUBMODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  try:
    return _load(name)
  except Exception as e:
    # hasattr() and inspect expect AttributeError, whatever keeps a dependency from being imported.
    raise AttributeError(f"{__name__}.{name} cannot be imported: {e}") from e


def __dir__():
  return sorted({*globals(), *_NAMES, *_SUBMODULES})


_extras.install(_load, tuple(_NAMES))
