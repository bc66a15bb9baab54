"""Fused q, k, v projection (one matmul) and convolution (one kernel) in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from deltanet_jax.mixers import layers
from deltanet_jax.ops import compiling_for, short_conv, short_convs
from deltanet_jax.ops.epilogue import Epilogue
from deltanet_jax.ops.testing import rel_rms
from deltanet_jax.sharding import AXES
from tests.support.tolerances import assert_close

WIDTH, LENGTH = 32, 40


def make(extra, value_size=32, **options):
  """Return QKV with two heads of 32 key channels, and further projections of the same input."""
  rngs = nnx.Rngs(0)
  epilogue = Epilogue("silu", "l2", 32), Epilogue("silu", size=value_size)
  qkv = layers.QKV(WIDTH, 64, 2 * value_size, 4, std=0.5, rngs=rngs, epilogue=epilogue, **options)
  linear = lambda n: layers.Linear((WIDTH, n), ("embed", None), std=0.5, rngs=rngs)
  return nnx.split((qkv, [linear(n) for n in extra]))


def draw(segments):
  rng = np.random.default_rng(0)
  # Rounded to bfloat16, so that all dtypes get the same values.
  x = np.asarray(jnp.asarray(rng.standard_normal((2, LENGTH, WIDTH)), jnp.bfloat16), np.float64)
  ids = np.cumsum(rng.random((2, LENGTH)) < 0.1, axis=1).astype(np.int32)
  return x, jnp.asarray(ids) if segments else None


def run(graph, x, ids):
  qkv, extra = graph
  return qkv(x, ids, None, extra=extra)[0]


def with_gradients(graph, weights, x, ids, dtype):
  """Return outputs and gradients by name."""
  x = jnp.asarray(x, dtype)
  outs, pull = jax.vjp(lambda w, x: run(nnx.merge(graph, w), x, ids), weights, x)
  rng = np.random.default_rng(1)
  ds = [rng.standard_normal(y.shape) for y in outs]
  narrow = lambda d: np.asarray(jnp.asarray(d, jnp.bfloat16), np.float64)
  dweights, dx = pull([jnp.asarray(narrow(d), dtype) for d in ds])
  grads = {f"d{jax.tree_util.keystr(at)}": y for at, y in jax.tree.leaves_with_path(dweights)}
  return {f"out {i}": y for i, y in enumerate(outs)} | grads | dict(dx=dx)


@pytest.mark.parametrize(
  "extra,value_size,segments,dtype",
  [
    ((16,), 32, True, "bfloat16"),
    ((6, 6), 64, True, "float32"),  # larger values than keys, and padded columns
    ((), 32, False, "float32"),
  ],
)
def test_fused_projection_equals_separate_ones(extra, value_size, segments, dtype, monkeypatch):
  graph, weights = make(extra, value_size)
  weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), weights)
  x, ids = draw(segments)
  wide = jax.tree.map(lambda w: w.astype(jnp.float64), weights)
  want = with_gradients(graph, wide, x, ids, "float64")
  calls = []
  kernel = functools.partial(short_convs, interpret=True)
  monkeypatch.setattr(layers, "has_short_convs", lambda *_: True)
  monkeypatch.setattr(layers, "short_convs", lambda *a, **b: calls.append(1) or kernel(*a, **b))
  got = with_gradients(graph, weights, x, ids, dtype)
  assert len(calls) == 1
  assert len(want) == 2 * (3 + len(extra)) + 3 + 1
  assert_close(got, want, dtype)


def test_second_derivatives():
  rng = np.random.default_rng(0)
  x, *kernels = (
    jnp.asarray(rng.standard_normal(shape), "float32") for shape in ((1, 9, 40), (2, 16), (2, 16))
  )
  epilogues = Epilogue("silu", "l2", 16), Epilogue("silu", size=16)

  def joint(x, *kernels):
    return short_convs(x, kernels, epilogues, interpret=True)

  def each(x, a, b):
    ys = [short_conv(x[..., :16], a, epilogue=epilogues[0])[0]]
    ys += [short_conv(x[..., 16:32], b, epilogue=epilogues[1])[0]]
    return [*ys, x[..., 32:]]

  def squares(f, *args):
    loss = lambda *args: sum(jnp.sin(y).sum() for y in f(*args))
    return sum((y * y).sum() for y in jax.grad(loss, argnums=(0, 1, 2))(*args))

  second = lambda f: jax.grad(functools.partial(squares, f), argnums=(0, 1, 2))(x, *kernels)
  for got, want in zip(second(joint), second(each)):
    assert rel_rms(got, want) < 2e-6


def count_matmuls_and_kernels(tensor=1, **options):
  """Count those of the layer traced for a GPU, on a mesh with `tensor` shards of the heads."""
  graph, weights = make((16,), **options)
  x = jnp.zeros((2, LENGTH, WIDTH), "bfloat16")
  sizes = tuple(tensor if axis == "tensor" else 1 for axis in AXES)
  mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
  with compiling_for("gpu"), jax.sharding.use_abstract_mesh(mesh):
    jaxpr = jax.make_jaxpr(lambda w, x: run(nnx.merge(graph, w), x, None))(weights, x)
  found = list(equations(jaxpr.jaxpr))
  kernels = [x for x in found if "short_conv_fwd" in str(x.params.get("name"))]
  return len([x for x in found if x.primitive.name == "dot_general"]), len(kernels)


def equations(jaxpr):
  """Yield all equations: the text of a jaxpr shows a function that is called twice only once."""
  for equation in jaxpr.eqns:
    yield equation
    if equation.primitive.name != "pallas_call":
      for inner in jaxprs_in_params(equation.params):
        yield from equations(inner)


def test_when_projections_are_fused():
  assert count_matmuls_and_kernels() == (1, 1)
  # Sharded weights are not concatenated.
  assert count_matmuls_and_kernels(tensor=2) == (4, 3)
  # A bias, and a head size that the kernel does not support.
  assert count_matmuls_and_kernels(bias=True)[0] == 4
  assert count_matmuls_and_kernels(value_size=48) == (4, 2)


def test_unsupported_inputs_raise():
  x, kernel = jnp.zeros((1, 8, 96), "float32"), jnp.zeros((4, 96))
  with pytest.raises(ValueError, match="got 96 in heads of 96; use short_conv"):
    short_convs(x, [kernel], [Epilogue(size=96)])
