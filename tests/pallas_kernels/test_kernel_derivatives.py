"""Kernels in interpret mode under JAX's transformations: reverse mode twice, scans, `vmap`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from deltanet_jax.ops import delta_rule
from deltanet_jax.ops.testing import Spec, rel_rms
from pallas_kernels.delta_rule import delta_rule_gpu, delta_rule_tpu
from tests.support.delta_rule import jax_inputs

RULES = {
  "tpu": functools.partial(delta_rule_tpu, chunk=16, interpret=True),
  "gpu": functools.partial(delta_rule_gpu, chunk=16, interpret=True),
  "gpu unfused": functools.partial(delta_rule_gpu, chunk=16, interpret=True, fused=False),
}
EXACT = functools.partial(delta_rule, implementation="recurrent")
# Each compiles for ten seconds: `make test` runs each test with one backend.
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
SPEC = Spec(B=1, L=20, H=1, Hv=2, dk=8, gate="scalar", packed=True)


def gradients(rule, inputs, ids):
  """Return the gradients of a loss that is nonlinear in every output."""
  loss = lambda x: sum(jnp.sin(y).sum() for y in rule(**x, segment_ids=ids))
  return jax.grad(loss)(inputs)


def squares(rule, inputs, ids):
  return sum((x * x).sum() for x in gradients(rule, inputs, ids).values())


def split_inputs(spec=SPEC, seed=0):
  inputs = jax_inputs(spec, seed, dtype="float32")
  return inputs, inputs.pop("segment_ids", None)


@pytest.mark.parametrize("backend", [SLOW("tpu"), SLOW("gpu"), "gpu unfused"])
def test_second_derivatives(backend):
  inputs, ids = split_inputs()
  got = jax.jit(jax.grad(functools.partial(squares, RULES[backend])))(inputs, ids)
  want = jax.jit(jax.grad(functools.partial(squares, EXACT)))(inputs, ids)
  errors = {name: rel_rms(got[name], want[name]) for name in want}
  assert max(errors.values()) < 2e-5, errors


@pytest.mark.parametrize("backend", ["tpu", SLOW("gpu")])
def test_second_derivatives_of_scanned_layers(backend):
  """As in a model with scanned layers that are recomputed in the backward pass."""
  inputs, ids = split_inputs(Spec(B=1, L=20, H=1, dk=8, packed=True))

  def loss(rule, inputs):
    @jax.checkpoint
    def layer(v, scale):
      return rule(**(inputs | dict(v=v)), segment_ids=ids)[0] * scale, None

    return jnp.sin(lax.scan(layer, inputs["v"], jnp.asarray([1.0, 2.0], "float32"))[0]).sum()

  def twice(rule):
    grads = jax.grad(functools.partial(loss, rule))
    return jax.jit(jax.grad(lambda x: sum((g * g).sum() for g in grads(x).values())))(inputs)

  got, want = (
    twice(RULES[backend]),
    twice(functools.partial(delta_rule, implementation="recurrent")),
  )
  errors = {name: rel_rms(got[name], want[name]) for name in want}
  assert max(errors.values()) < 2e-5, errors


@pytest.mark.parametrize("backend", [SLOW("tpu"), "gpu", SLOW("gpu unfused")])
def test_vmap_folds_into_the_batch(backend):
  """One call with a larger batch; arguments that are not batched are broadcast."""
  examples = [split_inputs(seed=seed) for seed in range(2)]
  shared = examples[0][0]["v"]
  stacked, ids = jax.tree.map(lambda *x: jnp.stack(x), *examples)
  stacked.pop("v")
  run = lambda x, ids: gradients(RULES[backend], x | dict(v=shared), ids)
  program = jax.jit(jax.vmap(run)).trace(stacked, ids)
  got = program.lower().compile()(stacked, ids)
  for i, (inputs, own) in enumerate(examples):
    want = jax.jit(run)({name: x for name, x in inputs.items() if name != "v"}, own)
    for name in want:
      np.testing.assert_allclose(got[name][i], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
  # The grid has a batch of two and the same number of axes as without `vmap`.
  alone = jax.jit(run).trace(stacked | jax.tree.map(lambda x: x[0], stacked), ids[0])
  axes = lambda program: {len(grid) for grid in _grids(program.jaxpr.jaxpr)}
  assert axes(program) == axes(alone)


def _grids(jaxpr):
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "pallas_call":
      yield eqn.params["grid_mapping"].grid
    for inner in jaxprs_in_params(eqn.params):
      yield from _grids(inner)
