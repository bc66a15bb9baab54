"""Linear attention kernels in interpret mode against the float64 recurrence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import linear_attention, linear_attention_step
from deltanet_jax.ops.testing import (
  Spec,
  cast,
  random_cotangents,
  random_inputs,
  rel_rms,
  with_gradients,
)
from pallas_kernels.linear_attention import linear_attention_gpu, linear_attention_tpu
from tests.support.tolerances import assert_close

KERNELS = ("pallas_tpu", "pallas_gpu")
CASES = [
  (dict(L=1), "float32"),
  (dict(packed=True), "float32"),
  (dict(gate="scalar", packed=True, Hv=4), "float32"),
  (dict(gate="scalar"), "bfloat16"),
  (dict(B=3, L=256, dk=24, dv=130), "bfloat16"),
  # Blocks of all sizes, log decays down to -20.
  (dict(B=1, L=40, gate="vector", packed=True, Hv=4), "float32"),
  (dict(B=1, L=40, H=1, gate="vector"), "bfloat16"),
]


def inputs_of(dtype, **change):
  """Return random inputs, rounded to a dtype, as float64."""
  inputs = cast(random_inputs(Spec(**(dict(B=2, L=140, H=2, dk=16, dv=32) | change))), dtype)
  del inputs["beta"]
  wide = lambda name, x: x if name == "segment_ids" else np.asarray(x, np.float64)
  return {name: wide(name, x) for name, x in inputs.items()}


def value_and_grads(inputs, dtype, **options):
  rule = functools.partial(linear_attention, scale=0.3, **options)
  inputs = cast(inputs, dtype)
  return with_gradients(rule)(inputs, random_cotangents(rule, inputs))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("change,dtype", CASES)
def test_kernel_equals_recurrence(change, dtype, implementation):
  inputs = inputs_of(dtype, **change)
  want = value_and_grads(inputs, "float64", implementation="recurrent")
  got = value_and_grads(inputs, dtype, implementation=implementation, interpret=True)
  assert got["o"].dtype == jnp.dtype(dtype) and got["S"].dtype == jnp.float32
  assert_close(got, want, dtype)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steep_per_channel_decays(dtype, implementation):
  inputs = inputs_of(dtype, B=1, L=40, H=1, gate="vector")
  steep = [-0.01, -1.0, -20.0, -1e3]
  rng = np.random.default_rng(0)
  inputs["g"] = rng.choice(steep, p=[0.6, 0.2, 0.15, 0.05], size=inputs["g"].shape)
  want = value_and_grads(inputs, "float64", implementation="recurrent")
  got = value_and_grads(inputs, dtype, implementation=implementation, interpret=True)
  assert_close(got, want, dtype)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_decoding_step(gate, implementation):
  inputs = inputs_of("float32", L=3, Hv=4, gate=gate)
  wide = cast(inputs, "float64")
  want, S_want = linear_attention(**wide, scale=0.3, implementation="recurrent")
  inputs = cast(inputs, "float32")
  S, g = inputs["S0"], inputs.get("g")
  options = dict(scale=0.3, implementation=implementation, interpret=True)
  for t in range(3):
    token = (inputs[name][:, t] for name in ("q", "k", "v"))
    o, S = linear_attention_step(*token, S, None if g is None else g[:, t], **options)
    assert rel_rms(o, want[:, t]) < 2e-6
  assert rel_rms(S, S_want) < 2e-6


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("gate", ["none", "vector"])
def test_second_derivatives_and_vmap(gate, platform):
  inputs = {
    n: jnp.asarray(x, "float32") for n, x in inputs_of("float32", B=1, L=16, H=1, gate=gate).items()
  }
  kernel = dict(tpu=linear_attention_tpu, gpu=linear_attention_gpu)[platform]
  rule = functools.partial(kernel, chunk=16, interpret=True)
  plain = functools.partial(linear_attention, implementation="chunkwise")

  def second(rule, inputs):
    first = jax.grad(lambda x: sum(jnp.sum(y**2) for y in rule(**x)))
    return jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(first(x))))(inputs)

  got, want = second(rule, inputs), second(plain, inputs)
  assert all(rel_rms(got[name], want[name]) < 2e-5 for name in want)
  pairs = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), inputs)
  got, want = (jax.vmap(lambda x, rule=rule: rule(**x))(pairs) for rule in (rule, plain))
  for x, y in zip(got, want):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_unsupported_inputs_raise():
  inputs = {n: jnp.asarray(x, "float32") for n, x in inputs_of("float32", L=4).items()}
  run = lambda **x: linear_attention(**inputs | x, implementation="pallas_tpu", interpret=True)
  with pytest.raises(ValueError, match="no decay of value channels"):
    run(h=jnp.zeros_like(inputs["v"]))
  with pytest.raises(ValueError, match="interpret=True is for Pallas kernels"):
    linear_attention(**inputs, interpret=True)
  with pytest.raises(TypeError, match=r'forward-mode .*"chunkwise" or "recurrent"'):
    jax.jvp(lambda v: run(v=v), (inputs["v"],), (inputs["v"],))
