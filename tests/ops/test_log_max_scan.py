"""The log-max scan against a float64 NumPy loop: values, gradients, segments, large exponents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import empty_log_max_state, log_max_scan
from deltanet_jax.ops.testing import random_cotangents, rel_rms, with_gradients

RNG = np.random.default_rng(0)
B, D = 2, 3
# Single-token segments and an id that recurs; one segment.
IDS = np.array([[4, 4, 4, 7, 4, 4, 4, 4, 4, 2, 0], [1] * 11], np.int32)


def draw(*shape):
  return RNG.standard_normal(shape)


def plain_sums(k, v, w, u, S0, ids):
  """Plain sums of exponentials: (y, A, B)."""
  A, Z = S0[:, 0] * np.exp(S0[:, 2]), S0[:, 1] * np.exp(S0[:, 2])
  y = np.zeros_like(v)
  for t in range(k.shape[1]):
    if t and ids is not None:
      starts = (ids[:, t] != ids[:, t - 1])[:, None]
      A, Z = np.where(starts, 0, A), np.where(starts, 0, Z)
    now = np.exp(u + k[:, t])
    y[:, t] = (A + now * v[:, t]) / (Z + now)
    A, Z = (np.exp(w) * x + np.exp(k[:, t]) * c for x, c in ((A, v[:, t]), (Z, 1)))
  return y, A, Z


def make_inputs(L, packed, **changes):
  S0 = np.stack([draw(B, D), np.exp(draw(B, D)), draw(B, D)], axis=1)
  arrays = dict(k=draw(B, L, D), v=draw(B, L, D), w=-np.exp(draw(D)), u=draw(D), S0=S0) | changes
  inputs = jax.tree.map(jnp.asarray, arrays)
  return inputs | (dict(segment_ids=jnp.asarray(IDS[:, :L])) if packed else {})


# Chunks that do and do not divide the length, one longer than it, and a single token.
@pytest.mark.parametrize("L,chunk,packed", [(11, 4, True), (8, 4, False), (1, 4, False)])
def test_equals_plain_sums_with_every_gradient(L, chunk, packed):
  inputs = make_inputs(L, packed)
  arrays = [np.asarray(inputs[name]) for name in ("k", "v", "w", "u", "S0")]
  y, A, Z = plain_sums(*arrays, IDS[:, :L] if packed else None)

  def run(implementation):
    f = functools.partial(log_max_scan, chunk=chunk, implementation=implementation)
    return with_gradients(f, ("y", "S"))(inputs, random_cotangents(f, inputs))

  results = run("chunkwise"), run("recurrent")
  for got in results:
    S = np.asarray(got["S"])
    assert rel_rms(got["y"], y) < 1e-13
    assert rel_rms(S[:, :2] * np.exp(S[:, 2:]), np.stack([A, Z], axis=1)) < 1e-13
  for name, x in results[1].items():
    assert rel_rms(results[0][name], x) < 1e-11, name


def test_gradients_are_those_of_plain_sums():
  """The unit is a constant for gradients, so finite differences check more than autodiff."""
  inputs = make_inputs(5, False)
  step = 1e-6
  f = jax.jit(jax.value_and_grad(lambda x: log_max_scan(**x, chunk=4)[0].sum()))
  grads = f(inputs)[1]
  for name in ("k", "w", "u"):
    by = jnp.zeros_like(inputs[name]).reshape(-1).at[1].set(step).reshape(inputs[name].shape)
    up, down = (f(inputs | {name: inputs[name] + s * by})[0] for s in (1, -1))
    assert abs((up - down) / (2 * step) - grads[name].reshape(-1)[1]) < 1e-7, name


def test_exponents_have_no_bound():
  k = draw(B, 9, D) * 1e4
  inputs = make_inputs(9, True, k=k, S0=np.asarray(empty_log_max_state(B, D, "float64")))
  inputs = {n: x.astype("float32") if n != "segment_ids" else x for n, x in inputs.items()}
  f = functools.partial(log_max_scan, chunk=4)
  got = with_gradients(f, ("y", "S"))(inputs, random_cotangents(f, inputs))
  assert all(np.isfinite(x).all() for x in got.values())
  # An average is within the range of the values.
  assert np.abs(got["y"]).max() <= np.abs(inputs["v"]).max() * 1.00001


def test_errors_name_the_argument(no_type_checks):
  x, w = jnp.zeros((1, 2, 3)), jnp.zeros(3)
  for changes, words in (
    (dict(implementation="fast"), "implementation is 'fast', expected one of"),
    (dict(k=x[0]), r"k has shape \(2, 3\), expected non-empty"),
    (dict(w=x), r"w has shape \(1, 2, 3\), expected \[D\]"),
    (dict(S0=x), r"S0 has shape \(1, 2, 3\), expected \[B, 3, D\]"),
    (dict(chunk=3), "chunk is 3, expected a power of two"),
  ):
    with pytest.raises(ValueError, match=words):
      log_max_scan(**dict(k=x, v=x, w=w, u=w) | changes)
