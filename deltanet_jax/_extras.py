"""Error messages that name the extra to install when an optional dependency is missing."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable

# The extra of pyproject.toml that installs a module.
_EXTRA = {
  "absl": "train",
  "flax": "models",
  "grain": "train",
  "matplotlib": "plots",
  "ml_collections": "train",
  "optax": "train",
  "orbax": "train",
  "pyarrow": "parquet",
  "safetensors": "models",
  "tensorboardX": "train",
  "tensorstore": "train",
  "tqdm": "train",
  "wandb": "wandb",
}
# What importing a subpackage takes beyond the core dependencies.
_NEEDS = {
  "deltanet_jax.data": ("grain",),
  "deltanet_jax.data.corpus.prepare": ("grain", "tqdm"),
  "deltanet_jax.eval": ("flax", "grain", "optax", "orbax", "safetensors", "tqdm"),
  "deltanet_jax.generate": ("flax",),
  "deltanet_jax.interop": ("flax", "safetensors"),
  "deltanet_jax.mixers": ("flax",),
  "deltanet_jax.models": ("flax",),
  "deltanet_jax.train": ("flax", "grain", "optax", "orbax", "safetensors", "tqdm"),
}


class MissingExtraError(ImportError):
  """A dependency is not installed; the message names the extra that installs it."""


def require(user: str, *modules: str):
  """Raise MissingExtraError if one of the modules, which `user` needs, is not installed."""
  missing = [module for module in modules if importlib.util.find_spec(module) is None]
  if not missing:
    return
  extras = {_EXTRA[module] for module in missing}
  if "train" in extras:
    extras.discard("models")  # `train` contains it
  names = ",".join(sorted(extras))
  plural = "s" if len(extras) > 1 else ""
  raise MissingExtraError(
    f"{user} needs the extra{plural} `{names}` (no module named {', '.join(missing)}):"
    f" pip install 'deltanet-jax[{names}]'",
    name=missing[0],
  )


class _Finder(importlib.abc.MetaPathFinder):
  """Checks the dependencies of a subpackage before Python searches for it; finds nothing itself.

  An import hook and not a check in `deltanet_jax.__getattr__`: `import deltanet_jax.train` does not
  call that, and `from deltanet_jax import load_trained` drops the message of its AttributeError.
  """

  def __init__(self, load: Callable[[str], object], names: tuple[str, ...]):
    self._load, self._names = load, names

  def find_spec(self, fullname, path=None, target=None):
    package, _, name = fullname.rpartition(".")
    if fullname in _NEEDS:
      require(fullname, *_NEEDS[fullname])
    elif package == "deltanet_jax" and name in self._names:
      # Only after hasattr(deltanet_jax, name) was False: raise what was in the way.
      self._load(name)
    return None


def install(load: Callable[[str], object], names: tuple[str, ...]):
  """Check dependencies from now on; `load` imports one of the lazy `names` of the package."""
  sys.meta_path.insert(0, _Finder(load, names))
