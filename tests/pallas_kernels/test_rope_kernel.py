"""Rotary position embeddings: TPU kernel in interpret mode against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import rope
from deltanet_jax.ops.testing import rel_rms

KERNEL = dict(implementation="pallas_tpu", interpret=True)


def inputs(H, d, L=40, B=2, dtype="float32"):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((B, L, H, d)), dtype)
  return x, jnp.asarray(rng.integers(0, 5000, (B, L)), jnp.int32)


# Heads smaller than a lane tile, of one and of two lane tiles; L is not a multiple of the block.
@pytest.mark.parametrize(
  "H,d,dtype", [(2, 64, "float32"), (8, 16, "bfloat16"), (3, 128, "float32"), (1, 256, "bfloat16")]
)
def test_kernel_equals_plain(H, d, dtype):
  x, positions = inputs(H, d, dtype=dtype)

  def value_and_gradient(**options):
    y, pull = jax.vjp(lambda x: rope(x, positions, 100.0, **options), x)
    return y, *pull(jnp.cos(y))

  got, want = value_and_gradient(**KERNEL), value_and_gradient(implementation="plain")
  for a, b in zip(got, want):
    assert a.dtype == x.dtype and rel_rms(a, b) < (1e-6 if dtype == "float32" else 4e-3)


def test_second_derivatives_and_vmap():
  x, positions = inputs(2, 64, L=5)

  def square(x, **options):
    grad = jax.grad(lambda x: jnp.sin(rope(x, positions, **options)).sum())(x)
    return (grad**2).sum()

  got, want = (
    jax.grad(lambda x: square(x, **o))(x) for o in (KERNEL, dict(implementation="plain"))
  )
  assert rel_rms(got, want) < 1e-6
  run = lambda x, p: rope(x, p, **KERNEL)
  both = jax.vmap(run)(jnp.stack([x, 2 * x]), jnp.stack([positions, positions + 1]))
  np.testing.assert_array_equal(both[1], run(2 * x, positions + 1))


def test_unsupported_inputs_raise():
  x, positions = inputs(2, 24)
  with pytest.raises(ValueError, match="full groups of 128 channels, got 2 heads of 24; use impl"):
    rope(x, positions, **KERNEL)
  with pytest.raises(ValueError, match="bfloat16 or float32, got float64"):
    rope(inputs(2, 64)[0].astype("float64"), positions, **KERNEL)
  with pytest.raises(ValueError, match=r"is for Pallas kernels.*got 'plain'"):
    rope(x, positions, implementation="plain", interpret=True)
  with pytest.raises(ValueError, match="compiled for a CPU"):
    rope(inputs(2, 64)[0], positions, implementation="pallas_tpu")
