"""Models on the user's own mesh; run by test_composable_models.py on eight simulated devices."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from deltanet_jax.config import ModelConfig
from deltanet_jax.models import build
from deltanet_jax.sharding import axis_rules
from tests.support.mixers import CASES

FAMILIES = {
  "deltanet": ("deltanet",),
  "transformer": ("attention",),
  "hybrid": ("gated_deltanet", "window"),
  "mamba": ("mamba",),
}


def make_config(family: str) -> ModelConfig:
  pattern = FAMILIES[family]
  return ModelConfig(
    vocab=32,
    width=16,
    depth=2,
    pattern=pattern,
    mixers={name: CASES[name] for name in pattern},
    mlp_inner=32,
    dtype="float32",
  )


def loss(model, tokens):
  return jnp.mean(jnp.sin(model(tokens)))


def _in_shard_map(model, tokens):
  mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)

  def gradient(model, tokens):
    return jax.value_and_grad(lambda model: jax.lax.pmean(loss(model, tokens), "dp"))(model)

  run = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P(), P()))
  return jax.jit(run)(model, tokens)


def _on_mesh(model, tokens, names, kind, rules):
  mesh = jax.make_mesh((4, 2), names, axis_types=(kind,) * 2)
  with jax.set_mesh(mesh), axis_rules(rules):
    model = jax.device_put(model, NamedSharding(mesh, P()))
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(names[0])))
    return jax.jit(jax.value_and_grad(loss))(model, tokens)


def _error(got, want):
  got, want = np.asarray(got), np.asarray(want)
  return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-4))


def main():
  rules = {"batch": "dp", "heads": "tp", "vocab": "tp", "mlp": "tp"}
  rng = np.random.default_rng(0)
  tokens = jnp.asarray(rng.integers(0, 32, (8, 12)), jnp.int32)
  for family in FAMILIES:
    model = build(make_config(family))
    want = jax.jit(jax.value_and_grad(loss))(model, tokens)
    results = {
      "shard_map": _in_shard_map(model, tokens),
      "own_names": _on_mesh(model, tokens, ("dp", "tp"), AxisType.Auto, {}),
      "own_names_with_rules": _on_mesh(model, tokens, ("dp", "tp"), AxisType.Auto, rules),
      "two_of_ours": _on_mesh(model, tokens, ("data", "tensor"), AxisType.Auto, {}),
      "explicit": _on_mesh(model, tokens, ("dp", "tp"), AxisType.Explicit, {}),
    }
    for name, got in results.items():
      error = max(jax.tree.leaves(jax.tree.map(_error, got, want)))
      print(json.dumps([family, name, error]), flush=True)


if __name__ == "__main__":
  main()
