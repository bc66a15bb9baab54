"""`delta_rule` with all its gradients, shared by the tests of every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.ops import delta_rule
from deltanet_jax.ops.testing import Spec, cast, random_cotangents, random_inputs, with_gradients


def jax_inputs(spec: Spec, *args, **kwargs) -> dict[str, jax.Array]:
  """`random_inputs` as JAX arrays."""
  return jax.tree.map(jnp.asarray, random_inputs(spec, *args, **kwargs))


def value_and_grads(inputs: dict, dtype: str, **options) -> dict[str, np.ndarray]:
  """Return o, S and the gradient of every input, for random cotangents of both outputs."""
  rule = functools.partial(delta_rule, **options)
  inputs = cast(inputs, dtype)
  outputs = with_gradients(rule)(inputs, random_cotangents(rule, inputs))
  assert outputs["o"].dtype == inputs["v"].dtype
  assert outputs["S"].dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
  return {name: np.asarray(x, np.float64) for name, x in outputs.items()}


@functools.cache
def reference(spec: Spec, dtype: str = "float64", **options):
  """Return inputs rounded to `dtype`, and the float64 recurrence with gradients at them."""
  rounded = {
    name: x if name == "segment_ids" else np.asarray(x, np.float64)
    for name, x in cast(random_inputs(spec), dtype).items()
  }
  return rounded, value_and_grads(rounded, "float64", implementation="recurrent", **options)
