"""Second-order and forward-mode derivatives of full models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.models import preset
from deltanet_jax.models.chunked_logits import batch_totals
from deltanet_jax.ops.testing import rel_rms
from tests.support.models import random_model

RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(0, 11, (2, 6)), jnp.int32)
# With segments: a double backward of the convolution once confused them with its input.
IDS = jnp.asarray(np.repeat([3, 1, 3], [2, 1, 3])[None].repeat(2, axis=0), jnp.int32)
BATCH = dict(tokens=TOKENS, targets=TOKENS[:, ::-1], segment_ids=IDS, mask=TOKENS > 0)
FAMILIES = ("deltanet", "gated-deltanet", "gla-conv", "retnet", "mamba", "transformer")
FAST = ("deltanet",)  # the others run in `make test-slow`


@functools.cache
def model_of(family, dtype="float64", **changes):
  """A model with scanned layers, and a direction in weight space."""
  options = dict(vocab=11, width=8, depth=2, mlp_multiple=8, dtype=dtype)
  rng = np.random.default_rng(1)
  model = random_model(preset(f"{family}-tiny", **options | changes), dtype)
  return model, jax.tree.map(lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape)), model)


def loss(model):
  return batch_totals(model, BATCH, 3)["loss"]


def dot(a, b):
  return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def reverse_over_reverse(model, d):
  """Hessian-vector product H d of the loss."""
  return jax.grad(lambda model: dot(jax.grad(loss)(model), d))(model)


@jax.jit
def forward_over_reverse(model, d):
  """The same, and the forward-mode derivative of the loss along d."""
  return jax.jvp(jax.grad(loss), (model,), (d,))[1], jax.jvp(loss, (model,), (d,))[1]


@jax.jit
def finite_differences(model, d, step=1e-3):
  """d H d and the derivative of the loss along d, by sixth-order central differences."""
  at = jax.vmap(lambda s: loss(jax.tree.map(lambda x, y: x + s * step * y, model, d)))
  values = at(jnp.arange(-3.0, 4.0))
  second = jnp.asarray([2.0, -27.0, 270.0, -490.0, 270.0, -27.0, 2.0]) @ values / (180 * step**2)
  return second, jnp.asarray([-1.0, 9.0, -45.0, 0.0, 45.0, -9.0, 1.0]) @ values / (60 * step)


@pytest.mark.parametrize(
  "family", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES]
)
def test_second_order_and_forward_mode(family):
  model, d = model_of(family)
  second, along = finite_differences(model, d)
  Hd = jax.jit(reverse_over_reverse)(model, d)
  np.testing.assert_allclose(dot(Hd, d), second, rtol=1e-5)
  # Of the delta rule, only the recurrent implementation supports forward mode.
  if "deltanet" in family:
    model, d = model_of(family, implementation="recurrent")
  forward, forward_along = forward_over_reverse(model, d)
  assert rel_rms(flat(forward), flat(Hd)) < 1e-10
  np.testing.assert_allclose(forward_along, along, rtol=1e-5)


@pytest.mark.slow
def test_second_order_without_jit_and_unrolled():
  model, d = model_of("deltanet")
  want = flat(jax.jit(reverse_over_reverse)(model, d))
  assert rel_rms(flat(reverse_over_reverse(model, d)), want) < 1e-10
  for changes in (dict(scan=False), dict(remat="full")):
    model, d = model_of("deltanet", **changes)
    assert rel_rms(flat(jax.jit(reverse_over_reverse)(model, d)), want) < 1e-10, changes


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_mode_of_chunkwise_names_the_implementation_that_supports_it(jit):
  model, d = model_of("deltanet")
  with pytest.raises(TypeError, match=r'forward-mode.*implementation="recurrent"'):
    jax.jvp(jit(loss), (model,), (d,))
