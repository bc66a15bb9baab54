"""The DPLR recurrence in chunks against its float64 recurrence, and the operators it contains."""

import functools

import numpy as np
import pytest

from deltanet_jax.ops import dplr
from deltanet_jax.ops.delta_rule.specs import Spec, random_inputs
from deltanet_jax.ops.numerics import cast, random_cotangents, with_gradients
from tests.support.tolerances import assert_close


def inputs_of(spec):
  """Those of the delta rule, with a unit vector a and b between 0 and a: transitions contract."""
  rng = np.random.default_rng(1)
  inputs = random_inputs(spec)
  beta = inputs.pop("beta")[..., None]
  a = rng.standard_normal(inputs["k"].shape)
  inputs["a"] = a / np.linalg.norm(a, axis=-1, keepdims=True)
  inputs["b"] = inputs["a"] * beta * rng.uniform(0.5, 1, a.shape)
  return inputs


def value_and_grads(inputs, dtype="float64", **options):
  rule = functools.partial(dplr, scale=0.3, **options)
  inputs = cast(inputs, dtype)
  outputs = with_gradients(rule)(inputs, random_cotangents(rule, inputs))
  assert outputs["o"].dtype == dtype
  return {name: np.asarray(x, np.float64) for name, x in outputs.items()}


@pytest.mark.parametrize(
  "L,chunk,gate,packed",
  [
    (1, 32, "vector", False),
    (37, 8, "none", False),
    (37, 8, "none", True),
    (65, 16, "scalar", True),
    (130, 64, "vector", True),
  ],
)
def test_chunkwise_equals_recurrence(L, chunk, gate, packed):
  inputs = inputs_of(Spec(B=2, L=L, H=3, dk=8, dv=12, gate=gate, packed=packed))
  want = value_and_grads(inputs, implementation="recurrent")
  assert_close(value_and_grads(inputs, chunk=chunk), want, "float64")
  if L == 130:
    assert_close(value_and_grads(inputs, "float32", chunk=chunk), want, "float32")
