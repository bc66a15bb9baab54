"""Short convolutions with fused epilogue in interpret mode against plain JAX in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import compiling_for, short_conv
from deltanet_jax.ops.epilogue import Epilogue
from deltanet_jax.ops.testing import random_cotangents, rel_rms, with_gradients
from tests.support.tolerances import assert_close

KERNELS = ("pallas_tpu", "pallas_gpu")
# Epilogue, length, channels, taps, segments, bias, dtype.
CASES = [
  (Epilogue("silu", "l2", 128), 300, 256, 4, True, False, "float32"),
  (Epilogue("silu", "l2", 32), 40, 128, 4, False, True, "bfloat16"),
  (Epilogue("elu", "l1", 64), 1, 128, 2, True, True, "float32"),
  (Epilogue("silu", size=128), 257, 128, 4, True, False, "bfloat16"),
  (Epilogue("relu", size=256), 16, 256, 3, False, True, "float32"),
]


def draw(L, D, W, segments, bias, B=2):
  rng = np.random.default_rng(0)
  inputs = dict(x=rng.standard_normal((B, L, D)), kernel=rng.standard_normal((W, D)))
  if bias:
    inputs["bias"] = rng.standard_normal(D)
  if segments:
    starts = rng.random((B, L)) < 0.1
    starts[:, L // 2 : L // 2 + 2] = True
    # An id that occurs again is another segment.
    inputs["segment_ids"] = (np.cumsum(starts, axis=1) % 3).astype(np.int32)
  # Rounded to bfloat16, so that all dtypes get the same values.
  narrow = lambda y: np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64)
  return {n: y if n == "segment_ids" else narrow(y) for n, y in inputs.items()}


def run(inputs, dtype, **options):
  f = functools.partial(short_conv, **options)
  cast = lambda n, y: jnp.asarray(y) if n == "segment_ids" else jnp.asarray(y, dtype)
  inputs = {name: cast(name, y) for name, y in inputs.items()}
  narrow = lambda y: np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64)
  cotangents = tuple(narrow(y) for y in random_cotangents(f, inputs))
  return with_gradients(f, ("y", "after"))(inputs, cotangents)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("epilogue,L,D,W,segments,bias,dtype", CASES)
def test_kernel_equals_plain(epilogue, L, D, W, segments, bias, dtype, implementation):
  inputs = draw(L, D, W, segments, bias)
  want = run(inputs, "float64", epilogue=epilogue, implementation="plain")
  got = run(inputs, dtype, epilogue=epilogue, implementation=implementation, interpret=True)
  assert_close(got, want, dtype)


@pytest.mark.parametrize("implementation", KERNELS)
def test_transformations(implementation):
  """`vmap` over taps, and second derivatives, equal those of plain JAX."""
  inputs = draw(20, 128, 4, True, False, B=1)
  ids = jnp.asarray(inputs.pop("segment_ids"))
  x, kernel = (jnp.asarray(y, "float32") for y in inputs.values())
  taps = jnp.stack([kernel, 2 * kernel, kernel[::-1]])
  options = dict(segment_ids=ids, epilogue=Epilogue("silu", "l2", 64))

  def loss(implementation, interpret, x, kernel):
    how = dict(implementation=implementation, interpret=interpret)
    return jnp.sin(short_conv(x, kernel, **options, **how)[0]).sum()

  def squares(f, x, kernel):
    return sum((y * y).sum() for y in jax.grad(f, argnums=(0, 1))(x, kernel))

  kernels, plain = (
    functools.partial(loss, *how) for how in ((implementation, True), ("plain", False))
  )
  second = lambda f: jax.grad(functools.partial(squares, f), argnums=(0, 1))
  for transform in (lambda f: jax.vmap(jax.grad(f, argnums=(0, 1)), (None, 0)), second):
    over = taps if transform is not second else kernel
    for got, want in zip(transform(kernels)(x, over), transform(plain)(x, over)):
      assert rel_rms(got, want) < 2e-6
  with pytest.raises(TypeError, match=r"forward-mode .* not supported by the kernel short_conv"):
    jax.jvp(lambda x: kernels(x, kernel), (x,), (x,))


@pytest.mark.parametrize("platform,call", [("tpu", "tpu_custom_call"), ("cuda", "triton")])
def test_platform_default(platform, call):
  x, kernel = jnp.zeros((1, 64, 256), "bfloat16"), jnp.zeros((4, 256))

  def lowered(x, state, **options):
    run = jax.jit(functools.partial(short_conv, **options))
    with compiling_for({"tpu": "tpu", "cuda": "gpu"}[platform]):
      return run.trace(x, kernel, state=state).lower(lowering_platforms=(platform,)).as_text()

  assert call in lowered(x, None, epilogue=Epilogue("silu", "l2", 128))
  # XLA with a state before the first token, and with head sizes that do not fit a tile.
  assert call not in lowered(x, jnp.zeros((1, 3, 256), "bfloat16"))
  assert call not in lowered(x, None, epilogue=Epilogue(size=96))


def test_unsupported_inputs_raise():
  x, kernel = jnp.zeros((1, 8, 96)), jnp.zeros((4, 96))
  for name, match in (
    ("pallas_tpu", "full groups of 128 channels, got 96 in heads of 96; use"),
    ("pallas_gpu", "heads of a power of two up to 512 channels, got 96 in heads of 96; use"),
  ):
    with pytest.raises(ValueError, match=match):
      short_conv(x.astype("float32"), kernel, epilogue=Epilogue(size=96), implementation=name)
  with pytest.raises(ValueError, match="interpret=True is for Pallas kernels"):
    short_conv(x, kernel, interpret=True)
  with pytest.raises(ValueError, match=r"state must be None; use implementation=\"plain\""):
    state = jnp.zeros((1, 3, 96), "float32")
    short_conv(x.astype("float32"), kernel, state=state, implementation="pallas_tpu")
