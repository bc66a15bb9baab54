"""Run by test_composable.py on eight simulated devices; prints one JSON pair per operator."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.composition import H, make_cases, make_kernel_cases

SHAPE, NAMES = (4, 2), ("dp", "tp")


def in_shard_map(case):
  mesh = jax.make_mesh(SHAPE, NAMES, axis_types=(AxisType.Auto,) * 2)
  total = functools.partial(jax.lax.psum, axis_name="dp")
  run = jax.shard_map(
    functools.partial(case.value_and_gradients, reduce=total),
    mesh=mesh,
    in_specs=(P("dp"), P()),
    out_specs=(P(), (P("dp"), P())),
  )
  return jax.jit(run)(case.batched, case.shared)


def explicitly_sharded(case):
  mesh = jax.make_mesh(SHAPE, NAMES, axis_types=(AxisType.Explicit,) * 2)
  with jax.set_mesh(mesh):
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    heads = lambda x: ("dp", None, "tp") if x.ndim == 4 and x.shape[2] == H else ("dp",)
    batched = {name: put(x, *heads(x)) for name, x in case.batched.items()}
    shared = {name: put(x) for name, x in case.shared.items()}
    return jax.jit(case.value_and_gradients)(batched, shared)


def error(got, want):
  got, want = (np.asarray(x.astype(jnp.float32)) for x in (got, want))
  return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-3))


run = {"shard_map": in_shard_map, "explicit": explicitly_sharded}[sys.argv[1]]
cases = make_cases() | {f"kernel_{name}": case for name, case in make_kernel_cases().items()}
for name, case in cases.items():
  want = jax.jit(case.value_and_gradients)(case.batched, case.shared)
  errors = jax.tree.leaves(jax.tree.map(error, run(case), want))
  print(json.dumps([name, max(errors)]), flush=True)
