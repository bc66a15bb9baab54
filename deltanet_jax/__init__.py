"""The delta rule and DeltaNet-style models in JAX.

Exports the most used names, imported lazily. Training is in `deltanet_jax.train`, generation in
`deltanet_jax.generate`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers; `__getattr__` imports them at run time
  from deltanet_jax.interop import load_fla
  from deltanet_jax.models import build, preset
  from deltanet_jax.ops import delta_rule, delta_rule_step
  from deltanet_jax.train import load_trained

__all__ = ["build", "delta_rule", "delta_rule_step", "load_fla", "load_trained", "preset"]


def __getattr__(name: str):
  """Import an exported name at first use, so that `delta_rule` needs neither Flax nor Orbax."""
  match name:
    case "delta_rule" | "delta_rule_step":
      from deltanet_jax import ops as module
    case "build" | "preset":
      from deltanet_jax import models as module
    case "load_fla":
      from deltanet_jax import interop as module
    case "load_trained":
      from deltanet_jax import train as module
    case _:
      raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(module, name)


def __dir__():
  return sorted({*globals(), *__all__})
