"""Chunkwise DPLR against its float64 recurrence, and against the operators it generalizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax.mixers import build_mixer
from deltanet_jax.mixers.rwkv7 import RWKV7Config
from deltanet_jax.ops import delta_rule, dplr, dplr_step, linear_attention
from deltanet_jax.ops.testing import (
  Spec,
  cast,
  random_cotangents,
  random_inputs,
  rel_rms,
  with_gradients,
)
from tests.support.tolerances import assert_close


def make_inputs(spec):
  """Inputs of the delta rule, with a unit vector a and b between 0 and a: transitions contract."""
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
  inputs = make_inputs(Spec(B=2, L=L, H=3, dk=8, dv=12, gate=gate, packed=packed))
  want = value_and_grads(inputs, implementation="recurrent")
  assert_close(value_and_grads(inputs, chunk=chunk), want, "float64")
  if L == 130:
    assert_close(value_and_grads(inputs, "float32", chunk=chunk), want, "float32")


SMALL = Spec(B=2, L=21, H=2, dk=8, dv=6, gate="vector", packed=True)
chunks_of_8 = jax.jit(functools.partial(dplr, chunk=8))


def test_without_a_and_b_it_is_linear_attention():
  inputs = jax.tree.map(jnp.asarray, make_inputs(SMALL))
  zeros = jnp.zeros_like(inputs.pop("a"))
  del inputs["b"]
  want = jax.jit(functools.partial(linear_attention, chunk=8))(**inputs)
  got = chunks_of_8(**inputs, a=zeros, b=zeros)
  assert max(map(rel_rms, got, want)) < 1e-12


def test_it_contains_the_delta_rule_with_a_per_channel_gate():
  inputs = jax.tree.map(jnp.asarray, random_inputs(SMALL))
  want = jax.jit(functools.partial(delta_rule, chunk=8))(**inputs)
  beta, k = inputs.pop("beta")[..., None], inputs["k"]
  inputs["v"] = beta * inputs["v"]
  got = chunks_of_8(**inputs, a=jnp.exp(inputs["g"]) * k, b=beta * k)
  assert max(map(rel_rms, got, want)) < 1e-12


def test_steps_continue():
  inputs = jax.tree.map(jnp.asarray, make_inputs(SMALL))
  del inputs["segment_ids"]
  inputs = {name: x if name == "S0" else x[:, :3] for name, x in inputs.items()}
  want, S_want = jax.jit(functools.partial(dplr, chunk=2))(**inputs)
  S = inputs.pop("S0")
  step = jax.jit(dplr_step)
  for t in range(3):
    o, S = step(**{f"{name}_t": x[:, t] for name, x in inputs.items()}, S=S)
    assert rel_rms(o, want[:, t]) < 1e-12
  assert rel_rms(S, S_want) < 1e-12


def test_forward_mode_needs_the_recurrent_form():
  """The chunkwise form raises, except over a gradient; a mixer setting selects the recurrence."""
  inputs = cast(make_inputs(Spec(L=7, H=1, dk=4, gate="vector")), "float64")
  run = lambda name: lambda x: jnp.sin(dplr(**x, implementation=name)[0]).sum()
  _, along = jax.jvp(run("recurrent"), (inputs,), (inputs,))
  grads = jax.grad(run(None))(inputs)
  want = sum(jnp.vdot(grads[name], x) for name, x in inputs.items())
  np.testing.assert_allclose(along, want, rtol=1e-10)
  with pytest.raises(TypeError, match=r'forward-mode .* only with implementation="recurrent"'):
    jax.jvp(run(None), (inputs,), (inputs,))
  over = [jax.jvp(jax.grad(run(name)), (inputs,), (inputs,))[1] for name in (None, "recurrent")]
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)
  jax.tree.map(close, *over)

  def loss(implementation):
    cfg = RWKV7Config(head_size=4, chunk=8, implementation=implementation)
    mixer = build_mixer(cfg, 8, std=0.3, rngs=nnx.Rngs(params=jax.random.key(0)))
    return lambda x: jnp.sin(mixer.mix(x, None, None)[0]).sum()

  x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 7, 8)))
  _, along = jax.jvp(loss("recurrent"), (x,), (jnp.cos(x),))
  np.testing.assert_allclose(along, jnp.vdot(jax.grad(loss(None))(x), jnp.cos(x)), rtol=1e-8)
  with pytest.raises(TypeError, match="forward-mode"):
    jax.jvp(loss(None), (x,), (x,))


def test_float32_matmuls_are_exact_on_every_platform():
  """TPU and GPU round to bfloat16 or TF32 by default; the backward pass must set the precision."""
  for dtype, exact in (("float32", True), ("bfloat16", False)):
    inputs = cast(make_inputs(Spec(L=8, H=2, dk=8, dv=8)), dtype)
    f = lambda x: sum(y.astype("float32").sum() for y in dplr(**x, chunk=4))
    text = str(jax.make_jaxpr(jax.grad(f))(inputs))
    # The inverse is always exact.
    matmuls = [line for line in text.split("\n") if "precision=" in line]
    assert matmuls and all("HIGHEST" in line for line in matmuls) == exact


def test_states_of_all_tokens_are_never_materialized():
  inputs = cast(make_inputs(Spec(L=1024, H=1, dk=32, gate="vector")), "float32")
  grad = jax.grad(lambda x: dplr(**x, chunk=16)[0].sum())
  memory = jax.jit(grad).lower(inputs).compile().memory_analysis()
  # Less than one state per token.
  assert memory.temp_size_in_bytes < 1024 * 32 * 32 * 4


@pytest.mark.parametrize(
  "change,message",
  [
    (dict(chunk=48), "chunk is 48"),
    (dict(implementation="pallas"), "implementation is 'pallas'"),
    (dict(a=jnp.zeros((1, 4, 2, 3))), "a has shape"),
    (dict(b=jnp.zeros((1, 4, 1, 8))), "b has shape"),
    (dict(v=jnp.zeros((1, 4, 4, 8))), "v has shape"),
    (dict(g=jnp.zeros((1, 4, 1))), "g has shape"),
    (dict(a=jnp.zeros((1, 4, 2, 8), jnp.int32)), "a has dtype int32"),
  ],
)
def test_wrong_arguments_are_clear_errors(change, message, no_type_checks):
  inputs = jax.tree.map(jnp.asarray, make_inputs(Spec(B=1, L=4, H=2, dk=8, dv=8)))
  with pytest.raises(ValueError, match=message):
    dplr(**inputs | change)
