"""Fused gated per-head RMSNorm in interpret mode against plain JAX in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import compiling_for, head_norm
from deltanet_jax.ops.testing import random_cotangents, rel_rms, with_gradients
from tests.support.tolerances import assert_close

KERNEL = dict(implementation="pallas_gpu", interpret=True)
# Length, channels, head size, gate activation, dtype.
CASES = [
  (300, 256, 128, None, "float32"),
  (40, 64, 32, jax.nn.silu, "bfloat16"),
  (1, 128, 64, jax.nn.sigmoid, "float32"),
  (9, 2048, 1024, jax.nn.silu, "float32"),
]


def draw(L, D, size, gate, B=2):
  rng = np.random.default_rng(0)
  inputs = dict(x=rng.standard_normal((B, L, D)), scale=1 + rng.standard_normal(size))
  if gate:
    inputs["gate"] = rng.standard_normal((B, L, D))
  # Rounded to bfloat16, so that all dtypes get the same values.
  return {n: np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64) for n, y in inputs.items()}


def run(inputs, dtype, **options):
  f = lambda **x: (head_norm(**x, eps=1e-5, **options),)
  inputs = {name: jnp.asarray(y, dtype) for name, y in inputs.items()}
  narrow = lambda y: np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64)
  cotangents = tuple(narrow(y) for y in random_cotangents(f, inputs))
  return with_gradients(f, ("y",))(inputs, cotangents)


@pytest.mark.parametrize("L,D,size,gate,dtype", CASES)
def test_kernel_equals_plain(L, D, size, gate, dtype):
  inputs = draw(L, D, size, gate)
  want = run(inputs, "float64", gate_activation=gate, implementation="plain")
  assert_close(run(inputs, dtype, gate_activation=gate, **KERNEL), want, dtype)


def test_transformations():
  """`vmap` over scales, and second derivatives, equal those of plain JAX."""
  x, scale, gate = (jnp.asarray(y, "float32") for y in draw(20, 64, 32, True, B=1).values())
  scales = jnp.stack([scale, 2 * scale])

  def loss(how, x, scale, gate):
    return jnp.sin(head_norm(x, scale, 1e-5, gate=gate, gate_activation=jax.nn.silu, **how)).sum()

  def squares(f, *args):
    return sum((y * y).sum() for y in jax.grad(f, argnums=(0, 1, 2))(*args))

  kernels, plain = (functools.partial(loss, how) for how in (KERNEL, {}))
  each = lambda f: jax.vmap(jax.grad(f, argnums=(0, 1, 2)), (None, 0, None))(x, scales, gate)
  second = lambda f: jax.grad(functools.partial(squares, f), argnums=(0, 1, 2))(x, scale, gate)
  for transformed in (each, second):
    for got, want in zip(transformed(kernels), transformed(plain)):
      assert rel_rms(got, want) < 2e-6
  with pytest.raises(TypeError, match=r"forward-mode .* not supported by the kernel head_norm"):
    jax.jvp(lambda x: kernels(x, scale, gate), (x,), (x,))


def test_platform_default():
  def lowered(platform, size):
    x, scale = jnp.zeros((1, 64, 2 * size), "bfloat16"), jnp.zeros(size)
    run = jax.jit(lambda x, scale: head_norm(x, scale, 1e-5))
    with compiling_for({"cuda": "gpu"}.get(platform, platform)):
      return run.trace(x, scale).lower(lowering_platforms=(platform,)).as_text()

  assert "head_norm_fwd" in lowered("cuda", 128)
  assert "head_norm_fwd" not in lowered("cuda", 96)
  assert "custom_call" not in lowered("tpu", 128)


def test_unsupported_inputs_raise():
  x, scale = jnp.zeros((1, 8, 96), "float32"), jnp.ones(96)
  for options, match in (
    (dict(implementation="pallas_gpu"), "power of two up to 2048 channels, got 96 in heads of 96"),
    (dict(interpret=True), "interpret=True is for Pallas kernels"),
  ):
    with pytest.raises(ValueError, match=match):
      head_norm(x, scale, 1e-5, **options)
  with pytest.raises(ValueError, match="a gate of x's dtype float32, got bfloat16; use"):
    gate, gate_activation = x[..., :64].astype("bfloat16"), jax.nn.silu
    options = dict(gate=gate, gate_activation=gate_activation, implementation="pallas_gpu")
    head_norm(x[..., :64], scale[:64], 1e-5, **options)
