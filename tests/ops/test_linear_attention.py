"""Decayed linear attention against its float64 recurrence: values and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import linear_attention, linear_attention_step
from deltanet_jax.ops.testing import Spec, random_inputs, rel_rms
from tests.support.tolerances import assert_close


def make_inputs(spec, dtype="float64", values_decay=False):
  inputs = random_inputs(spec, dtype=dtype)
  del inputs["beta"]
  if values_decay:
    log_rates = np.random.default_rng(2).uniform(np.log(1e-3), np.log(20), spec.v_shape)
    inputs["h"] = -np.exp(log_rates).astype(dtype)
  return jax.tree.map(jnp.asarray, inputs)


def value_and_grads(inputs, **options):
  inputs = dict(inputs)
  segment_ids = inputs.pop("segment_ids", None)

  @jax.jit
  def run(inputs):
    f = lambda x: linear_attention(**x, segment_ids=segment_ids, scale=0.3, **options)
    (o, S), pull = jax.vjp(f, inputs)
    rng = np.random.default_rng(1)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return o, S, pull((draw(o), draw(S)))[0]

  o, S, grads = run(inputs)
  return dict(o=o, S=S, **{f"d{name}": g for name, g in grads.items()})


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize(
  "B,L,chunk,packed", [(2, 1, 64, False), (2, 65, 16, True), (1, 65, 16, True), (2, 130, 64, True)]
)
def test_chunkwise_equals_recurrence(B, L, chunk, packed, gate):
  spec = Spec(B=B, L=L, H=2, Hv=4, dk=8, dv=12, gate=gate, packed=packed)
  inputs = make_inputs(spec)
  want = value_and_grads(inputs, implementation="recurrent")
  assert_close(value_and_grads(inputs, chunk=chunk), want, "float64")
  if L == 130:
    got = value_and_grads(make_inputs(spec, "float32"), chunk=chunk)
    assert_close(got, want, "float32")


@pytest.mark.parametrize("gate", ["none", "vector"])
def test_decay_of_value_channels(gate):
  spec = Spec(B=2, L=40, H=2, Hv=4, dk=8, dv=12, gate=gate, packed=True)
  inputs = make_inputs(spec, values_decay=True)
  want = value_and_grads(inputs, implementation="recurrent")
  assert_close(value_and_grads(inputs, chunk=32), want, "float64")
  if gate == "vector":
    got = value_and_grads(make_inputs(spec, "float32", values_decay=True), chunk=32)
    assert_close(got, want, "float32")


def test_equal_channel_gates_equal_a_head_gate():
  inputs = make_inputs(Spec(B=2, L=70, H=2, dk=8, dv=12, gate="scalar"))
  run = jax.jit(lambda **x: linear_attention(**x, chunk=32))
  o, S = run(**inputs)
  g = inputs.pop("g")[..., None]
  for decay in (dict(g=jnp.repeat(g, 8, axis=3)), dict(h=jnp.repeat(g, 12, axis=3))):
    o_same, S_same = run(**inputs, **decay)
    assert rel_rms(o_same, o) < 1e-12 and rel_rms(S_same, S) < 1e-12


def test_steps_continue():
  spec = Spec(B=2, L=5, H=2, Hv=4, dk=8, dv=12, gate="vector")
  inputs = make_inputs(spec, values_decay=True)
  want, S_want = linear_attention(**inputs, chunk=4)
  S = inputs["S0"]
  for t in range(5):
    q, k, v, g, h = (inputs[name][:, t] for name in ("q", "k", "v", "g", "h"))
    o, S = linear_attention_step(q, k, v, S, g, h)
    assert rel_rms(o, want[:, t]) < 1e-12
  assert rel_rms(S, S_want) < 1e-12


def test_float32_matmuls_are_exact_on_every_platform():
  """TPU and GPU round to bfloat16 or TF32 by default; the backward pass must set the precision."""
  spec = Spec(L=8, H=2, dk=8, dv=8)
  for dtype, exact in (("float32", True), ("bfloat16", False)):
    inputs = make_inputs(spec, dtype, values_decay=exact)
    f = lambda x: sum(y.astype("float32").sum() for y in linear_attention(**x, chunk=4))
    text = str(jax.make_jaxpr(jax.grad(f))(inputs))
    matmuls = [line for line in text.split("\n") if "precision=" in line]
    assert matmuls and all(("HIGHEST" in line) == exact for line in matmuls)


@pytest.mark.parametrize(
  "change,message",
  [
    (dict(chunk=48), "chunk is 48"),
    (dict(implementation="pallas"), "implementation is 'pallas'"),
    (dict(k=jnp.zeros((1, 4, 2, 3))), "k has shape"),
    (dict(v=jnp.zeros((1, 4, 3, 8))), "a multiple of 2"),
    (dict(g=jnp.zeros((1, 4, 1))), "g has shape"),
    (dict(h=jnp.zeros((1, 4, 2))), "h has shape"),
    (dict(S0=jnp.zeros((1, 2, 8, 7))), "S0 has shape"),
    (dict(segment_ids=jnp.zeros((1, 3), jnp.int32)), "segment_ids has shape"),
    (dict(q=jnp.zeros((1, 4, 2, 8), jnp.int32)), "q has dtype int32"),
  ],
)
def test_wrong_arguments_are_clear_errors(change, message, no_type_checks):
  with pytest.raises(ValueError, match=message):
    linear_attention(**make_inputs(Spec(B=1, L=4, H=2, dk=8, dv=8)) | change)
