"""The chunkwise delta rule under `jax.vmap`, and with non-finite inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import delta_rule
from deltanet_jax.ops.testing import Spec
from tests.support.delta_rule import jax_inputs

SPEC = Spec(B=2, L=21, H=2, dk=8)
# Segments that cross the boundaries of chunks of 8.
LENGTHS = (9, 7, 5)
IDS = jnp.asarray(np.repeat(np.arange(3), LENGTHS)[None].repeat(2, axis=0), jnp.int32)


def gradients(inputs, segment_ids=None):
  f = lambda x: jnp.sin(delta_rule(**x, segment_ids=segment_ids, chunk=8)[0]).sum()
  return jax.value_and_grad(f)(inputs)


def vmapped_inputs(*scales):
  """Inputs whose keys have these norms: above 1.4 with beta near 1 some reflect the state."""
  inputs = [jax_inputs(SPEC, seed, dtype="float32") for seed in range(len(scales))]
  return [x | {"k": scale * x["k"]} for x, scale in zip(inputs, scales)]


def assert_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("ids", [None, IDS], ids=["unpacked", "packed"])
def test_vmap_folds_into_the_batch(ids):
  inputs = vmapped_inputs(1.0, 0.5, 1.0, 0.9)
  one = jax.jit(gradients)
  want = [one(x, ids) for x in inputs]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *inputs)
  got = jax.jit(jax.vmap(lambda x: gradients(x, ids)))(stacked)
  # Bitwise equal to a loop over the vmapped axis: blocks are the same.
  for i in range(4):
    assert_equal(jax.tree.map(lambda x: x[i], got), want[i])
  twice = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), stacked)
  nested = jax.jit(jax.vmap(jax.vmap(lambda x: gradients(x, ids))))(twice)
  assert_equal(jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), nested), got)


def test_vmap_broadcasts_unbatched_inputs_and_takes_one_branch():
  first, second = vmapped_inputs(1.0, 1.9)
  shared = {name: first[name] for name in ("v", "S0")}
  own = {name: jnp.stack([first[name], second[name]]) for name in ("q", "k", "beta")}
  # The second reflects its state, so both are corrected; it is still a cond, not a select.
  program = jax.jit(jax.vmap(lambda x: gradients(shared | x))).trace(own)
  assert " cond[" in str(program.jaxpr)
  got = program.lower().compile()(own)
  for i in range(2):
    want = gradients(shared | {name: x[i] for name, x in own.items()})
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.slow
def test_second_order_under_vmap():
  inputs = jax.tree.map(lambda x: x[:, :5] if x.shape[1] == SPEC.L else x, vmapped_inputs(1.0)[0])
  squared = lambda x: sum((g * g).sum() for g in gradients(x)[1].values())
  one = jax.jit(jax.grad(squared))(inputs)
  two = jax.jit(jax.vmap(jax.grad(squared)))(jax.tree.map(lambda x: jnp.stack([x, x]), inputs))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=1e-4, atol=1e-5), two, one)


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["unpacked", "packed"])
def test_nonfinite_values_reach_only_later_outputs(gate, ids):
  """Poisoning later tokens is a common test of causality."""
  inputs = jax_inputs(Spec(B=2, L=21, H=2, dk=8, gate=gate), dtype="float32")
  rule = lambda x: delta_rule(**x, segment_ids=ids, chunk=8, implementation="chunkwise")

  @jax.jit
  def run(x, follows):
    unaffected = lambda x: jnp.where(follows[..., None, None], 0, rule(x)[0]).sum()
    return *rule(x), jax.grad(unaffected)(x)

  t, end = 11, 21 if ids is None else 16
  follows = np.zeros((2, 21), bool)
  follows[0, t:end] = True
  o, S, _ = run(inputs, follows)
  poisons = [(name, np.nan) for name in inputs if name not in ("q", "S0")]
  for name, poison in [*poisons, ("k", np.inf), ("v", -np.inf)]:
    got, got_S, grads = run(inputs | {name: inputs[name].at[0, t].set(poison)}, follows)
    np.testing.assert_array_equal(got[~follows], o[~follows], err_msg=name)
    assert np.isnan(got[follows]).all(), name
    assert np.isnan(got_S[0]).all() if ids is None else (got_S == S).all(), name
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads)), name
  got, got_S, _ = run(inputs | {"S0": inputs["S0"].at[0, 0, 0, 0].set(np.nan)}, follows)
  affected = np.zeros((2, 21, 2), bool)
  affected[0, : 21 if ids is None else LENGTHS[0], 0] = True
  np.testing.assert_array_equal(got[~affected], o[~affected])
  assert np.isnan(got[affected]).all()
