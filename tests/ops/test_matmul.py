"""`matmul` with weights: derivatives equal to JAX's, in the intended dtypes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops.matmul import matmul
from tests.support.tolerances import assert_close

NAMES = ("y", "dx", "dkernel")


def inputs():
  rng = np.random.default_rng(0)
  shapes = (3, 5, 32), (32, 48), (3, 5, 48)
  return [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]


def grads(product, x, kernel, d):
  y, pull = jax.vjp(product, x, kernel)
  return y, *pull(d.astype(y.dtype))


def test_second_order_and_forward_mode():
  x, kernel, d = inputs()
  # Nonlinear in x and the kernel, so that second derivatives are nonzero for both.
  loss = lambda product: lambda x, kernel: (jnp.sin(product(x, kernel)) * d).sum()

  def derivatives(function):
    inner = jax.grad(function, argnums=(0, 1))
    again = jax.grad(lambda *args: sum(jnp.cos(y).sum() for y in inner(*args)), argnums=(0, 1))
    along = jax.jvp(function, (x, kernel), (jnp.cos(x), jnp.sin(kernel)))
    return inner(x, kernel), again(x, kernel), along

  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)
  jax.tree.map(close, derivatives(loss(matmul)), derivatives(loss(jnp.matmul)))


@pytest.mark.parametrize("accumulate", [False, True])
def test_all_three_matmuls_multiply_in_the_dtype_of_x(accumulate):
  """With `accumulate`, result and gradients are summed in float32."""
  x, kernel, d = inputs()
  product = lambda x, kernel: matmul(x, kernel, accumulate)
  run = lambda x, kernel: grads(product, x, kernel, d)
  narrow = x.astype("bfloat16"), kernel.astype("float32")
  assert_close(*(dict(zip(NAMES, run(*args))) for args in (narrow, (x, kernel))), "bfloat16")
  y = "float32" if accumulate else "bfloat16"
  assert [y.dtype for y in run(*narrow)] == [y, "bfloat16", "float32"]
  text = jax.jit(run).lower(*narrow).as_text()
  products = re.findall(r"dot_general.*: \((.*)\) -> tensor<[^>]*x(\w+)>", text)
  assert len(products) == 3 and not any("f32" in factors for factors, _ in products), products
  assert {result for _, result in products} == {"f32" if accumulate else "bf16"}


def test_checkpoint_policies_can_save_the_result():
  """A policy that saves matmuls sees this one: the backward pass multiplies only twice."""
  x, kernel, _ = inputs()
  keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  layer = jax.checkpoint(lambda x, kernel: jnp.sin(matmul(x, kernel)).sum(), policy=keep)
  text = jax.jit(jax.grad(layer, argnums=(0, 1))).lower(x, kernel).as_text()
  assert len(re.findall("dot_general", text)) == 3
