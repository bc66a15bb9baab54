"""Properties of every mixer: recurrence, prefill, decoding, segments, causality, finite values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from deltanet_jax.mixers import MIXERS, build_mixer, mixer_class
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.ops.testing import rel_rms
from tests.mixers.numpy_reference import REFERENCES
from tests.support.mixers import CASES, B, D, L, make

# The first case of each kind; its variants run in `make test-slow`.
_FIRST = {cfg.kind: name for name, cfg in reversed(CASES.items())}.values()
ALL = pytest.mark.parametrize(
  "name", [x if x in _FIRST else pytest.param(x, marks=pytest.mark.slow) for x in CASES]
)
# Segments of a packed sequence: one crosses a chunk boundary, one has a single token. Other tests
# compile a prefill of length 4 too.
LENGTHS = (4, 1, 4)
IDS = jnp.asarray(np.repeat([3, 1, 3], LENGTHS)[None].repeat(B, axis=0), jnp.int32)

# Shared by all tests, so that each is compiled once per mixer and shape.
forward = jax.jit(lambda mixer, x: mixer(x))
prefill = jax.jit(lambda mixer, x, state: mixer.mix(x, None, state))
packed_prefill = jax.jit(lambda mixer, x, state: mixer.mix(x, IDS, state))
packed_forward = jax.jit(lambda mixer, x: mixer(x, IDS))
step = jax.jit(lambda mixer, x_t, state: mixer.step(x_t, state))


@jax.jit
def forward_and_gradients(mixer, x, dy):
  """y and the gradients of weights and x."""
  y, pull = jax.vjp(lambda mixer, x: mixer(x), mixer, x)
  return y, *pull(dy)


@jax.jit
def recurrence_and_gradients(mixer, x, dy):
  """The same, from one `step` per token: the recurrent form."""

  def run(mixer, x):
    body = lambda state, x_t: mixer.step(x_t, state)[::-1]
    _, y = lax.scan(body, mixer.init_state(B, L, x.dtype), jnp.moveaxis(x, 1, 0))
    return jnp.moveaxis(y, 0, 1)

  y, pull = jax.vjp(run, mixer, x)
  return y, *pull(dy)


def draw(shape, seed):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def steps(mixer, x, state):
  """Decode x token by token from a state; return y `[B L D]`."""
  y = []
  for t in range(x.shape[1]):
    y_t, state = step(mixer, x[:, t], state)
    y.append(y_t)
  return jnp.stack(y, axis=1)


def start(mixer):
  return mixer.init_state(B, 2 * L, "float64")


@pytest.mark.parametrize("name", CASES)
def test_equals_the_numpy_reference(name):
  mixer, x = make(name)
  # The first case of each kind needs its gradients anyway.
  y = forward_and_gradients(mixer, x, x)[0] if name in _FIRST else forward(mixer, x)
  assert rel_rms(y[0], REFERENCES[mixer.cfg.kind].plain(mixer, np.asarray(x[0]))) < 1e-9


@ALL
def test_forward_and_gradients_equal_the_recurrent_form(name):
  mixer, x = make(name)
  dy = draw(x.shape, 1)
  y, *grads = forward_and_gradients(mixer, x, dy)
  want, *want_grads = recurrence_and_gradients(mixer, x, dy)
  assert rel_rms(y, want) < 1e-10
  errors = jax.tree.map(rel_rms, grads, want_grads)
  assert max(jax.tree.leaves(errors)) < 1e-8, errors
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(want_grads)), "a weight has zero gradient"


@ALL
@pytest.mark.parametrize(
  "splits",
  # Inside a chunk and at its end: every length is compiled, and all lengths take minutes.
  [(0, 4, 5, L), pytest.param(range(L + 1), marks=pytest.mark.slow)],
  ids=["some", "all"],
)
def test_prefill_and_decoding_continue_at_any_position(name, splits):
  mixer, x = make(name)
  want, *_ = forward_and_gradients(mixer, x, x)
  for s in splits:
    first, state = prefill(mixer, x[:, :s], start(mixer)) if s else (x[:, :0], start(mixer))
    rests = [x[:, :0]]
    if s < L:
      rests = prefill(mixer, x[:, s:], state)[0], steps(mixer, x[:, s:], state)
    for rest in rests:
      assert rel_rms(jnp.concatenate([first, rest], axis=1), want) < 1e-10, s


@ALL
def test_packed_segments_equal_separate_sequences(name):
  mixer, x = make(name)
  segments = jnp.split(x, np.cumsum(LENGTHS)[:-1], axis=1)
  separate = [prefill(mixer, segment, start(mixer)) for segment in segments]
  want = jnp.concatenate([y for y, _ in separate], axis=1)
  assert rel_rms(packed_forward(mixer, x), want) < 1e-10
  got, state = packed_prefill(mixer, x, start(mixer))
  assert rel_rms(got, want) < 1e-10
  # The returned state belongs to the last segment.
  more = draw((B, 4, D), 2)
  assert rel_rms(steps(mixer, more, state), steps(mixer, more, separate[-1][1])) < 1e-10
  # The given state belongs to the first segment.
  _, before = prefill(mixer, more, start(mixer))
  continued, _ = prefill(mixer, segments[0], before)
  want = jnp.concatenate([continued, want[:, LENGTHS[0] :]], axis=1)
  assert rel_rms(packed_prefill(mixer, x, before)[0], want) < 1e-10


@ALL
def test_causality(name):
  mixer, x = make(name)
  for t in range(L):
    dy = jnp.zeros_like(x).at[:, t].set(1)
    *_, dx = forward_and_gradients(mixer, x, dy)
    dependence = np.abs(dx).max(axis=(0, 2))
    np.testing.assert_array_equal(dependence[t + 1 :], 0)
    assert dependence[t] > 0


@ALL
# Gates are float32 in both: bfloat16 adds the casts.
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_finite_with_extreme_gates(name, dtype):
  mixer, x = make(name, "float32")
  scale = jnp.asarray(np.repeat([1.0, 1e3, -1e3], L // 3), jnp.float32)[None, :, None]
  extreme = (x * scale).astype(dtype)
  y, *grads = forward_and_gradients(mixer, extreme, jnp.ones_like(extreme))
  assert y.dtype == dtype
  assert all(np.isfinite(np.asarray(z, np.float32)).all() for z in (y, *jax.tree.leaves(grads)))


def test_every_kind_has_a_case_and_its_own_config():
  assert {cfg.kind for cfg in CASES.values()} == set(MIXERS)
  for kind in MIXERS:
    assert mixer_class(kind).Config.kind == kind


def test_invalid_configs_raise():
  cfg = AttentionConfig(head_size=8, heads=4, kv_heads=3)
  with pytest.raises(ValueError, match="kv_heads is 3"):
    jax.eval_shape(lambda: build_mixer(cfg, D, rngs=None))
  with pytest.raises(ValueError, match=r"mixer kind is 'abacus' .*, expected one of"):
    mixer_class("abacus")
