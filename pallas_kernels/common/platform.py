"""Raise a clear error when a kernel is compiled for a platform that it does not support."""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_PLATFORMS = ("cpu", "tpu", "cuda", "rocm")
_require_platform = Primitive("require_platform")


def require_platform(x: jax.Array, platform: str, name: str) -> jax.Array:
  """Return x; compiling a program that contains this for another platform raises ValueError.

  The check runs at lowering, not at tracing: a process may compile for a device it does not have.

  Args:
    x: any input of the kernel.
    platform: "cuda" or "tpu".
    name: of the kernel, for the message.
  """
  return _require_platform.bind(x, platform=platform, name=name)


def _lower(compiled_for, _, x, *, platform, name):
  if platform != compiled_for:
    chip = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}[platform]
    here = {"cpu": "a CPU", "tpu": "a TPU", "cuda": "an NVIDIA GPU", "rocm": "an AMD GPU"}
    raise ValueError(
      f"{name} is a kernel for {chip}, but this program is compiled for {here[compiled_for]}. Use"
      " an implementation in plain JAX, or interpret=True to run a Pallas kernel slowly on a CPU."
    )
  return [x]


_require_platform.def_impl(
  lambda x, **params: jax.jit(functools.partial(_require_platform.bind, **params))(x)
)
_require_platform.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_require_platform, lambda d, _, **__: [d])
batching.primitive_batchers[_require_platform] = lambda x, axes, **params: (
  _require_platform.bind(*x, **params),
  axes[0],
)
for compiled_for in _PLATFORMS:
  mlir.register_lowering(
    _require_platform, functools.partial(_lower, compiled_for), platform=compiled_for
  )
