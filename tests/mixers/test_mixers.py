"""What every mixer must keep: its recurrence, continuation, documents, causality, finiteness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.mixers.cases import CASES, B, D, L, make
from tests.tolerances import rel_rms

ALL = pytest.mark.parametrize("name", CASES)
# Documents of a packed row: odd lengths, one of a single token, over chunk boundaries.
LENGTHS = (5, 1, 9, 6)
IDS = np.repeat([3, 1, 3, 2], LENGTHS)[None].repeat(B, axis=0).astype(np.int32)


def steps(mixer, x, state):
  """y token by token, `step` being the recurrence itself."""

  def body(state, x_t):
    y_t, state = mixer.step(x_t, state)
    return state, y_t

  state, y = lax.scan(body, state, jnp.moveaxis(x, 1, 0))
  return jnp.moveaxis(y, 0, 1), state


@ALL
def test_equals_its_recurrence_with_every_gradient(name):
  mixer, x = make(name)
  dy = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape))

  @jax.jit
  def both(mixer, x):
    whole, pull = jax.vjp(lambda m, x: m(x), mixer, x)
    start = mixer.init_state(B, L, x.dtype)
    recurrent, pull_recurrent = jax.vjp(lambda m, x: steps(m, x, start)[0], mixer, x)
    return (whole, pull(dy)), (recurrent, pull_recurrent(dy))

  (y, grads), (want, want_grads) = both(mixer, x)
  assert rel_rms(y, want) < 1e-10
  errors = jax.tree.map(rel_rms, grads, want_grads)
  assert max(jax.tree.leaves(errors)) < 1e-8, errors
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(want_grads)), "a weight does nothing"


@ALL
@pytest.mark.parametrize("cuts", [(7, 15), (1, 3), (16, 20)])
def test_prefill_and_steps_continue_exactly(name, cuts):
  mixer, x = make(name)
  a, b = cuts

  @jax.jit
  def run(mixer, x):
    state = mixer.init_state(B, L, x.dtype)
    first, state = mixer.prefill(x[:, :a], state)
    second, state = mixer.prefill(x[:, a:b], state)
    third, _ = steps(mixer, x[:, b:], state)
    return mixer(x), jnp.concatenate([first, second, third], axis=1)

  want, got = run(mixer, x)
  assert rel_rms(got, want) < 1e-10


@ALL
def test_packed_equals_separate(name):
  mixer, x = make(name)
  ends = np.cumsum(LENGTHS)

  @jax.jit
  def run(mixer, x):
    start = mixer.init_state(B, L + 3, x.dtype)
    packed = mixer(x, jnp.asarray(IDS))
    prefilled, state = mixer.prefill(x, start, jnp.asarray(IDS))
    more, _ = steps(mixer, x[:, :3], state)
    separate = [mixer(x[:, end - n : end]) for n, end in zip(LENGTHS, ends)]
    # The state that a packed row leaves is that of its last document.
    last = jnp.concatenate([x[:, -LENGTHS[-1] :], x[:, :3]], axis=1)
    return packed, prefilled, more, jnp.concatenate(separate, axis=1), mixer(last)[:, -3:]

  packed, prefilled, more, separate, after = run(mixer, x)
  assert rel_rms(packed, separate) < 1e-10
  assert rel_rms(prefilled, separate) < 1e-10
  assert rel_rms(more, after) < 1e-10


@ALL
def test_no_token_sees_a_later_one(name):
  mixer, x = make(name)
  x = x[:1]

  @jax.jit
  def gradients(mixer, x):
    y, pull = jax.vjp(mixer, x)
    ones = jnp.eye(L, dtype=y.dtype)[:, None, :, None] * jnp.ones((1, 1, 1, D), y.dtype)
    return jax.vmap(lambda dy: pull(dy)[0])(ones)[:, 0]

  sees = np.abs(gradients(mixer, x)).max(axis=-1)  # [from, to]
  np.testing.assert_array_equal(np.triu(sees, 1), 0)
  assert (np.diagonal(sees) > 0).all()


@ALL
def test_finite_in_bfloat16_and_with_extreme_gates(name):
  mixer, x = make(name, "float32")
  scale = jnp.asarray(np.repeat([1.0, 1e3, -1e3], 7), jnp.float32)[None, :, None]

  @jax.jit
  def run(mixer, x):
    f = lambda m, x: m(x).astype(jnp.float32).sum()
    return mixer(x), jax.grad(f, argnums=(0, 1))(mixer, x)

  for dtype in ("bfloat16", "float32"):
    y, grads = run(mixer, (x * scale).astype(dtype))
    assert y.dtype == dtype
    assert all(np.isfinite(np.asarray(z, np.float32)).all() for z in (y, *jax.tree.leaves(grads)))
