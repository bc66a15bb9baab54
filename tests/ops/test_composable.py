"""Operators compose with the user's `shard_map`, explicit sharding and eager calls."""

import functools
import json

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.compilations import count_compilations
from tests.support.composition import H, make_cases, make_kernel_cases
from tests.support.training import launch, wait_for_exit

CASES = make_cases() | {f"kernel_{name}": case for name, case in make_kernel_cases().items()}


@pytest.mark.parametrize("name", CASES)
def test_inside_a_shard_map_values_and_gradients_have_consistent_types(name):
  case = CASES[name]
  mesh = AbstractMesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
  total = functools.partial(jax.lax.psum, axis_name="dp")
  run = jax.shard_map(
    functools.partial(case.value_and_gradients, reduce=total),
    mesh=mesh,
    in_specs=(P("dp"), P()),
    out_specs=(P(), (P("dp"), P())),
  )
  jax.jit(run).trace(case.batched, case.shared)


@pytest.mark.parametrize("name", CASES)
def test_explicitly_sharded_arguments_keep_their_sharding(name):
  case = CASES[name]
  mesh = AbstractMesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)

  def typed(x, *spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))

  with jax.sharding.use_abstract_mesh(mesh):
    heads = lambda x: ("dp", None, "tp") if x.ndim == 4 and x.shape[2] == H else ("dp",)
    batched = {name: typed(x, *heads(x)) for name, x in case.batched.items()}
    shared = {name: typed(x) for name, x in case.shared.items()}
    result = jax.eval_shape(lambda batched, shared: case.f(**batched, **shared), batched, shared)
    first = jax.tree.leaves(result)[0]
    assert first.sharding.spec[0] == "dp", first
    jax.jit(case.value_and_gradients).trace(batched, shared)


@pytest.mark.parametrize(
  "name",
  ["delta_rule_None", "delta_rule_gated_recurrent", "linear_attention_chunkwise", "rms_norm"],
)
def test_a_second_eager_call_compiles_nothing(name):
  case = CASES[name]

  def run():
    case.f(**case.batched, **case.shared)
    case.value_and_gradients(case.batched, case.shared)

  run()
  with count_compilations() as compilations:
    run()
  assert compilations == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shard_map", "explicit"])
def test_results_on_eight_devices_equal_those_on_one(mode):
  output = wait_for_exit(launch(["-m", "tests.support.composition_worker", mode], devices=8))
  errors = {name: error for name, error in map(json.loads, output.splitlines()[-len(CASES) :])}
  assert errors.keys() == CASES.keys()
  assert {name: error for name, error in errors.items() if not error < 2e-5} == {}
