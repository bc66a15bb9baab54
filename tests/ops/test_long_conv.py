"""Long convolutions by FFT against the direct sum: values, gradients, segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import long_conv, long_conv_attention
from deltanet_jax.ops.testing import rel_rms


def draw(*shape, dtype="float64", seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def segments(B, L):
  rng = np.random.default_rng(1)
  # Ids recur, and differ between sequences.
  return jnp.asarray(np.cumsum(rng.random((B, L)) < 0.05, axis=1) % 3, jnp.int32)


def value_and_gradients(f, *args):
  @jax.jit
  def run(*args):
    y, pull = jax.vjp(f, *args)
    return y, *pull(draw(*y.shape, dtype=y.dtype, seed=2))

  return run(*args)


# Inside one block, and beyond the shortest halves computed by FFT; filters of any length.
@pytest.mark.parametrize("L,T,packed", [(9, 40, False), (140, 50, False), (133, 133, True)])
def test_fft_equals_the_direct_sum(L, T, packed):
  B, d, H = 2, 6, 3
  ids = segments(B, L) if packed else None
  run = lambda name: lambda u, h: long_conv(u, h, segment_ids=ids, implementation=name)
  args = draw(B, L, d), draw(T, H, seed=3)
  want = value_and_gradients(run("direct"), *args)
  for got, expected in zip(value_and_gradients(run(None), *args), want):
    assert rel_rms(got, expected) < 1e-12
  if not packed:
    return
  narrow = value_and_gradients(run(None), *(x.astype(jnp.float32) for x in args))
  for got, expected in zip(narrow, want):
    assert got.dtype == jnp.float32 and rel_rms(got, expected) < 1e-5


def test_the_direct_sum_is_the_definition():
  u, h, ids = draw(1, 7, 4), draw(3, 2, seed=3), np.asarray([[5, 5, 5, 2, 2, 5, 5]])
  want = np.zeros((1, 7, 4))
  for t in range(7):
    for j in range(max(0, t - 2), t + 1):
      if (ids[0, j : t + 1] == ids[0, t]).all():
        want[0, t] += np.repeat(h[t - j], 2) * u[0, j]
  got = long_conv(u, h, segment_ids=jnp.asarray(ids), implementation="direct")
  np.testing.assert_allclose(got, want, atol=1e-14)


def test_causality_and_segments_are_exact():
  L = 40
  ids, u, h = segments(1, L), draw(1, L, 2, dtype="float32"), draw(L, 2, dtype="float32", seed=3)
  jacobian = jax.jit(jax.jacrev(lambda u: long_conv(u, h, segment_ids=ids)[0, :, 0]))(u)[:, 0, :, 0]
  number = np.cumsum(np.diff(np.asarray(ids[0]), prepend=ids[0, 0]) != 0)
  allowed = np.tril(number[:, None] == number[None, :])
  np.testing.assert_array_equal(np.asarray(jacobian)[~allowed], 0)
  assert np.asarray(jacobian)[allowed].all() and number[-1] > 0
  # A segment with huge values does not change the others, not even by rounding.
  huge = u * jnp.where(jnp.asarray(number) == 0, 1e20, 1.0).astype(u.dtype)[None, :, None]
  run = jax.jit(lambda u: long_conv(u, h, segment_ids=ids))
  got, want = (run(x)[:, number > 0] for x in (huge, u))
  np.testing.assert_array_equal(got, want)


def test_outer_products_equal_an_attention_matrix():
  B, L, H, N = 2, 40, 2, 3
  ids = segments(B, L)
  q, k, v = (draw(B, L, H, N, seed=i) for i in range(3))
  h = draw(L, H, seed=3)

  def quadratic(q, k, v, h):
    lag = jnp.arange(L)[:, None] - jnp.arange(L)[None, :]
    number = jnp.cumsum(jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0))), axis=1)
    mask = (lag >= 0)[None] & (number[:, :, None] == number[:, None, :])
    P = jnp.einsum("bthn,bjhn->btjh", q, k) * h[jnp.maximum(lag, 0)][None]
    return jnp.einsum("btjh,bjhn->bthn", jnp.where(mask[..., None], P, 0), v)

  want = value_and_gradients(quadratic, q, k, v, h)
  run = lambda *args: long_conv_attention(*args, segment_ids=ids)
  for got, expected in zip(value_and_gradients(run, q, k, v, h), want):
    assert rel_rms(got, expected) < 1e-12


def test_wrong_inputs_are_clear_errors(no_type_checks):
  with pytest.raises(ValueError, match=r"with d a multiple of H"):
    long_conv(draw(1, 4, 3), draw(4, 2))
  with pytest.raises(ValueError, match="implementation is 'slow', expected one of"):
    long_conv(draw(1, 4, 4), draw(4, 2), implementation="slow")
