"""Methods of NNX modules that compose with the user's own JAX code."""

import functools
from collections.abc import Callable, Mapping

from flax import nnx
from jax.sharding import PartitionSpec

from deltanet_jax.ops.composable import composable


def composable_method(*, like: Mapping[int, str] | None = None) -> Callable[[Callable], Callable]:
  """Decorate a method of a module with `composable`: the module is an argument, a pytree.

  The state of random number generators inside the module, for instance that of `nnx.Dropout`,
  advances as in a call of the plain method.

  Args:
    like: As for `composable`.
  """

  def decorate(method):
    @functools.wraps(method)
    def functional(self, *args, **kwargs):
      return method(self, *args, **kwargs), nnx.state(self, nnx.RngState)

    compiled = composable(like=like, also=lambda specs: (specs, PartitionSpec()))(functional)

    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
      result, rng_state = compiled(self, *args, **kwargs)
      if rng_state:
        nnx.update(self, rng_state)
      return result

    return wrapper

  return decorate
