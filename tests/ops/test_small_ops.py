"""Norms, RoPE, short convolution, selective scan, logcumsumexp against float64 NumPy loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import (
  compiling_for,
  l1_norm,
  l2_norm,
  layer_norm,
  logcumsumexp,
  rms_norm,
  rope,
  selective_scan,
  short_conv,
)
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.ops.segments import segment_positions
from deltanet_jax.ops.testing import random_cotangents, rel_rms, with_gradients

RNG = np.random.default_rng(0)
# Segments of two sequences of 11 tokens: single tokens, an id that recurs, one segment.
IDS = np.array([[4, 4, 4, 7, 4, 4, 4, 4, 4, 2, 0], [1] * 11], np.int32)


def draw(*shape):
  return RNG.standard_normal(shape)


def starts(ids):
  return np.concatenate([np.zeros((len(ids), 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def test_norms():
  x = draw(3, 5) * np.array([[1e-4], [1.0], [1e3]])
  x[0, 0] = 0
  scale = draw(5)
  array = jnp.asarray(x)
  for got, want in (
    (
      rms_norm(array, jnp.asarray(scale), 1e-6),
      scale * x / np.sqrt((x**2).mean(1)[:, None] + 1e-6),
    ),
    (l2_norm(array), x / np.sqrt((x**2).sum(1)[:, None] + 1e-6)),
    (l1_norm(array), x / (np.abs(x).sum(1)[:, None] + 1e-6)),
  ):
    assert rel_rms(got, want) < 1e-14
  bias, centred = draw(5), x - x.mean(1)[:, None]
  want = scale * centred / np.sqrt((centred**2).mean(1)[:, None] + 1e-6) + bias
  got = layer_norm(array, jnp.asarray(scale), jnp.asarray(bias), 1e-6)
  assert rel_rms(got, want) < 1e-13
  assert l2_norm(jnp.ones((2, 4), jnp.bfloat16)).dtype == jnp.bfloat16
  zero = jax.grad(lambda x: l2_norm(x).sum() + l1_norm(x).sum())(jnp.zeros((1, 4)))
  assert np.isfinite(zero).all()


@pytest.mark.parametrize("dtype,limit", [("float32", 5e-7), ("bfloat16", 4e-3)])
def test_per_head_norms_on_tpu(dtype, limit):
  """Reductions by matmuls with 0/1 matrices: values and gradients against float64."""
  x, d, scale = draw(3, 7, 4 * 16) * 50 + 20, draw(3, 7, 4 * 16), draw(16)

  def run(dtype):
    x_, d_, scale_ = (jnp.asarray(y, dtype) for y in (x, d, scale))
    scales = lambda scale: jnp.tile(scale, 4)
    f = lambda x, scale: (
      l2_norm(x, 16),
      rms_norm(x, scale, 1e-6),
      layer_norm(x, scales(scale), None, 1e-6, 16),
    )
    out, pull = jax.vjp(f, x_, scale_)
    return *out, *pull((d_,) * 3)

  x, d, scale = (np.asarray(jnp.asarray(y, dtype), np.float64) for y in (x, d, scale))
  want = run("float64")
  with compiling_for("tpu"):
    got = run(dtype)
  for x, expected in zip(got, want):
    assert rel_rms(x, expected) < limit


def test_accum_dtype_accepts_names():
  assert accum_dtype("float64") == accum_dtype(jnp.float64) == jnp.float64
  assert accum_dtype("bfloat16") == accum_dtype(jnp.dtype("float32")) == jnp.float32


def test_rope_rotates_pairs():
  x, position = draw(2, 3, 2, 6), np.array([[0, 1, 5], [7, 0, 100_000]], np.int32)
  z = x[..., :3] + 1j * x[..., 3:]
  z = z * np.exp(1j * position[:, :, None, None] * 50.0 ** (-np.arange(3) / 3))
  want = np.concatenate([z.real, z.imag], axis=-1)
  assert rel_rms(rope(jnp.asarray(x), jnp.asarray(position), 50.0), want) < 1e-12
  with pytest.raises(ValueError, match="head size 5"):
    rope(jnp.zeros((1, 1, 1, 5)), jnp.zeros((1, 1), jnp.int32))


def test_positions_restart_with_each_segment():
  start = jnp.asarray([5, 2], jnp.int32)
  got = segment_positions(start, 11, jnp.asarray(IDS))
  np.testing.assert_array_equal(got[0], [5, 6, 7, 0, 0, 1, 2, 3, 4, 0, 0])
  np.testing.assert_array_equal(got[1], 2 + np.arange(11))
  np.testing.assert_array_equal(segment_positions(start, 2), [[5, 6], [2, 3]])


def numpy_conv(x, kernel, bias, state, ids):
  """Convolve one token at a time, with the last W - 1 inputs as the state."""
  y = np.zeros_like(x)
  for b in range(x.shape[0]):
    window = state[b].copy()
    for t in range(x.shape[1]):
      if ids is not None and starts(ids)[b, t]:
        window[:] = 0
      window = np.concatenate([window, x[b, t : t + 1]])
      y[b, t] = (kernel * window).sum(axis=0) + bias
      window = window[1:]
    state[b] = window
  return y, state


@pytest.mark.parametrize("L", [1, 2, 11])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("W", [2, 4])
def test_short_conv(W, packed, L):
  x, kernel, bias, state = draw(2, L, 3), draw(W, 3), draw(3), draw(2, W - 1, 3)
  ids = IDS[:, :L] if packed else None
  want, after = numpy_conv(x, kernel, bias, state.copy(), ids)
  options = dict(bias=jnp.asarray(bias), segment_ids=None if ids is None else jnp.asarray(ids))
  arrays = (jnp.asarray(y) for y in (x, kernel, state))
  got, got_after = jax.jit(lambda x, kernel, state: short_conv(x, kernel, state=state, **options))(
    *arrays
  )
  assert rel_rms(got, want) < 1e-14
  np.testing.assert_array_equal(got_after, after)


def test_short_conv_rejects_a_state_of_the_wrong_shape(no_type_checks):
  with pytest.raises(ValueError, match=r"state has shape \(2, 1, 3\), expected .* \[2, 3, 3\]"):
    short_conv(jnp.zeros((2, 5, 3)), jnp.zeros((4, 3)), state=jnp.zeros((2, 1, 3)))


def numpy_scan(u, dt, A, B, C, D, S, ids):
  y = []
  for t in range(u.shape[1]):
    if ids is not None:
      S = np.where(starts(ids)[:, t, None, None], 0, S)
    wrote = (dt[:, t] * u[:, t])[:, :, None] * B[:, t, None]
    S = np.exp(dt[:, t, :, None] * A) * S + wrote
    y.append((S * C[:, t, None]).sum(axis=-1) + D * u[:, t])
  return np.stack(y, axis=1), S


# Chunks that do and do not divide the length, one longer than it, and single tokens.
@pytest.mark.parametrize(
  "L,chunk,packed", [(11, 4, False), (11, 4, True), (8, 4, True), (11, 64, True), (1, 4, False)]
)
def test_selective_scan(L, chunk, packed):
  # Includes steps of 0, and steps so large that the state is forgotten.
  dt, A = RNG.choice([0.0, 0.3, 1.0, 1e4], (2, L, 3)), -np.exp(draw(3, 2))
  arrays = dict(u=draw(2, L, 3), dt=dt, A=A, B=draw(2, L, 2), C=draw(2, L, 2), D=draw(3))
  arrays["S0"] = draw(2, 3, 2)
  ids = IDS[:, :L] if packed else None
  want, after = numpy_scan(*arrays.values(), ids)
  inputs = jax.tree.map(jnp.asarray, arrays)
  if packed:
    inputs["segment_ids"] = jnp.asarray(ids)

  def run(implementation):
    f = functools.partial(selective_scan, chunk=chunk, implementation=implementation)
    return with_gradients(f, ("y", "S"))(inputs, random_cotangents(f, inputs))

  with compiling_for("gpu"):  # an associative scan per chunk; a CPU scans over tokens
    associative = run("chunkwise")
  got, by_token = run("chunkwise"), run("recurrent")
  assert max(rel_rms(x["y"], want) for x in (got, associative, by_token)) < 1e-13
  assert max(rel_rms(x["S"], after) for x in (got, associative, by_token)) < 1e-13
  assert len(got) == 2 + len(arrays)
  for name, x in by_token.items():
    assert max(rel_rms(got[name], x), rel_rms(associative[name], x)) < 1e-12, name


def test_selective_scan_errors_name_the_argument(no_type_checks):
  x, A, B = jnp.zeros((1, 2, 3)), jnp.zeros((3, 4)), jnp.zeros((1, 2, 4))
  for changes, words in (
    (dict(implementation="fast"), "implementation is 'fast', expected one of"),
    (dict(B=B[:, :1]), r"B has shape \(1, 1, 4\), expected"),
    (dict(A=A.T), r"A has shape \(4, 3\), expected"),
    (dict(chunk=3), "chunk is 3, expected a power of two"),
  ):
    with pytest.raises(ValueError, match=words):
      selective_scan(**dict(u=x, dt=x, A=A, B=B, C=B) | changes)


def test_logcumsumexp():
  """Against NumPy sums: with a state, segments, and exponents that overflow."""
  rng = np.random.default_rng(0)
  x, z0 = 30 * rng.standard_normal((2, 11, 2, 3)), rng.standard_normal((2, 2, 3))
  ids = np.repeat([4, 1, 4], [3, 1, 7])[None].repeat(2, axis=0)
  e = np.exp(np.asarray(x, np.longdouble))
  want = np.log(np.cumsum(e, axis=1) + np.exp(z0)[:, None])
  assert rel_rms(logcumsumexp(jnp.asarray(x), z0=jnp.asarray(z0)), want) < 1e-14
  packed = np.concatenate([want[:, :3], np.log(e[:, 3:4]), np.log(np.cumsum(e[:, 4:], 1))], axis=1)
  got = logcumsumexp(jnp.asarray(x), z0=jnp.asarray(z0), segment_ids=jnp.asarray(ids))
  assert rel_rms(got, packed) < 1e-14
  # d z_L / d x_t = e^{x_t - z_L}; no exponential overflows float32.
  large = jnp.asarray(100 * x, jnp.float32)
  grads = jax.grad(lambda x: logcumsumexp(x)[:, -1].sum())(large)
  np.testing.assert_allclose(grads, jax.nn.softmax(large, axis=1), atol=1e-6)


def test_logcumsumexp_of_wrong_shapes_is_a_clear_error(no_type_checks):
  x = jnp.zeros((2, 11, 2, 3))
  with pytest.raises(ValueError, match="z0 has shape"):
    logcumsumexp(x, z0=x[:1, 0])
  with pytest.raises(ValueError, match="x has shape"):
    logcumsumexp(x[:, 0])
