"""Models compose with the user's own mesh, explicit sharding, eager calls, copies and pickles."""

import contextlib
import copy
import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deltanet_jax.models import build
from deltanet_jax.sharding import axis_rules
from tests.support.compilations import count_compilations
from tests.support.composition_models import FAMILIES, loss, make_config
from tests.support.training import launch, wait_for_exit

TOKENS = jnp.zeros((8, 12), jnp.int32)
RULES = {"batch": "dp", "heads": "tp", "vocab": "tp", "mlp": "tp"}
MESHES = {
  "own_names": (("dp", "tp"), AxisType.Auto, contextlib.nullcontext),
  "own_names_with_rules": (("dp", "tp"), AxisType.Auto, functools.partial(axis_rules, RULES)),
  "two_of_ours": (("data", "tensor"), AxisType.Auto, contextlib.nullcontext),
  "explicit": (("dp", "tp"), AxisType.Explicit, contextlib.nullcontext),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_and_its_gradient_trace_inside_a_shard_map(family):
  model = build(make_config(family))
  mesh = AbstractMesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

  def gradient(model, tokens):
    return jax.value_and_grad(lambda model: jax.lax.pmean(loss(model, tokens), "dp"))(model)

  run = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()))
  jax.jit(run).trace(model, TOKENS)


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_imposes_no_axis_names_on_the_mesh(family, mesh_name):
  names, kind, rules = MESHES[mesh_name]
  mesh = AbstractMesh((4, 2), names, axis_types=(kind,) * 2)
  put = lambda x, *spec: jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec))
  )
  model = build(make_config(family))
  with jax.sharding.use_abstract_mesh(mesh), rules():
    jax.jit(jax.value_and_grad(loss)).trace(jax.tree.map(put, model), put(TOKENS, names[0]))


def test_unknown_logical_axes_are_an_error():
  with pytest.raises(ValueError, match=r"unknown logical axes \['head'\], expected some of"):
    axis_rules({"head": "tp"})


def test_a_second_eager_call_of_a_model_compiles_nothing():
  model = build(make_config("deltanet"))

  def run():
    model(TOKENS)
    nnx.value_and_grad(loss)(model, TOKENS)
    _, state = model.prefill(TOKENS, model.init_state(8, 16))
    model.step(TOKENS[:, 0], state)

  run()
  with count_compilations() as compilations:
    run()
  assert compilations == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copied_or_pickled_model_computes_the_same(family):
  model = build(make_config(family))
  want = np.asarray(model(TOKENS))
  for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
    np.testing.assert_array_equal(again(TOKENS), want)


@pytest.mark.slow
def test_results_on_eight_devices_equal_those_on_one():
  output = wait_for_exit(launch(["-m", "tests.support.composition_models"], devices=8))
  errors = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
  assert len(errors) == len(FAMILIES) * (1 + len(MESHES))
  assert [row for row in errors if not row[2] < 1e-5] == []
