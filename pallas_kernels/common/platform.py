"""A kernel that meets a platform it is not written for says so, whenever it is compiled."""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_PLATFORMS = ("cpu", "tpu", "cuda", "rocm")
_only_on = Primitive("only_on")


def only_on(x: jax.Array, platform: str, name: str) -> jax.Array:
  """x; a program in which it occurs compiles for `platform` ("cuda" or "tpu") alone.

  Not asked of this process while tracing, which may compile for a device that it does not have.
  """
  return _only_on.bind(x, platform=platform, name=name)


def _lower(compiled_for, _, x, *, platform, name):
  if platform != compiled_for:
    chip = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}[platform]
    here = {"cpu": "a CPU", "tpu": "a TPU", "cuda": "an NVIDIA GPU", "rocm": "an AMD GPU"}
    raise ValueError(
      f"{name} is a kernel for {chip}, and this program is compiled for {here[compiled_for]}: use"
      ' implementation="chunkwise" (Pallas kernels run slowly on a CPU with interpret=True).'
    )
  return [x]


_only_on.def_impl(lambda x, **params: jax.jit(functools.partial(_only_on.bind, **params))(x))
_only_on.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_only_on, lambda d, _, **__: [d])
batching.primitive_batchers[_only_on] = lambda x, axes, **params: (
  _only_on.bind(*x, **params),
  axes[0],
)
for compiled_for in _PLATFORMS:
  mlir.register_lowering(_only_on, functools.partial(_lower, compiled_for), platform=compiled_for)
