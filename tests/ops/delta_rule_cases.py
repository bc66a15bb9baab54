"""Running `delta_rule` with all its gradients, shared by the tests of every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.ops import delta_rule
from deltanet_jax.ops.delta_rule.specs import Spec, random_inputs


def jax_inputs(spec: Spec, *args, **kwargs) -> dict[str, jax.Array]:
  return jax.tree.map(jnp.asarray, random_inputs(spec, *args, **kwargs))


def value_and_grads(inputs: dict, dtype: str, **options) -> dict[str, np.ndarray]:
  """o, S and the gradient of every input, for random cotangents on both outputs."""
  inputs = dict(inputs)
  segment_ids = jax.tree.map(jnp.asarray, inputs.pop("segment_ids", None))
  # S0 is a state: float32 at least, whatever the inputs are.
  wide = lambda name: "float32" if name == "S0" and dtype == "bfloat16" else dtype
  inputs = {name: jnp.asarray(x, wide(name)) for name, x in inputs.items()}

  @jax.jit
  def run(inputs, do, dS):
    f = lambda q, k, v, beta, **rest: delta_rule(
      q, k, v, beta, segment_ids=segment_ids, **rest, **options
    )
    (o, S), pull = jax.vjp(lambda x: f(**x), inputs)
    (grads,) = pull((do.astype(o.dtype), dS.astype(S.dtype)))
    return o, S, grads

  rng = np.random.default_rng(1)
  S_shape = (inputs["v"].shape[0], inputs["v"].shape[2], inputs["k"].shape[3], inputs["v"].shape[3])
  do, dS = rng.standard_normal(inputs["v"].shape), rng.standard_normal(S_shape)
  o, S, grads = run(inputs, do, dS)
  assert o.dtype == inputs["v"].dtype
  assert S.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
  outputs = dict(o=o, S=S, **{f"d{name}": x for name, x in grads.items()})
  return {name: np.asarray(x, np.float64) for name, x in outputs.items()}


@functools.cache
def reference(spec: Spec, dtype: str = "float64", **options):
  """The float64 recurrence, at inputs first rounded to `dtype`."""
  inputs = random_inputs(spec)
  wide = lambda name: "float32" if name == "S0" and dtype == "bfloat16" else dtype
  rounded = {
    name: x if name == "segment_ids" else np.asarray(jnp.asarray(x, wide(name)), np.float64)
    for name, x in inputs.items()
  }
  return rounded, value_and_grads(rounded, "float64", implementation="recurrent", **options)
