"""Special cases in which Mamba-2, mLSTM and RWKV-6 reduce to simpler formulas; HGRN-2's bounds."""

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.mixers import mixer_config
from deltanet_jax.mixers.mlstm import running_max
from deltanet_jax.ops import linear_attention
from deltanet_jax.ops.testing import rel_rms
from tests.mixers.numpy_reference import hgrn2
from tests.support.mixers import D, L, draw_mixer, make


def test_per_channel_decay_with_equal_channels_equals_per_head_decay():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
  q, k, v, g = draw(1, 9, 2, 4), draw(1, 9, 2, 4), draw(1, 9, 2, 3), -jnp.exp(draw(1, 9, 2))
  run = jax.jit(lambda g: linear_attention(q, k, v, g=g, chunk=4))
  scalar, vector = run(g), run(jnp.broadcast_to(g[..., None], q.shape))
  assert max(map(rel_rms, scalar, vector)) < 1e-13


def test_mamba2_groups_with_equal_keys_equal_one_group():
  """Without the output norm, which is over the channels of a group and so differs."""
  options = dict(head_size=8, state_size=4, conv=0, chunk=4)
  one, x = draw_mixer(mixer_config("mamba2")(**options))
  two, _ = draw_mixer(mixer_config("mamba2")(groups=2, **options))
  for name in ("value", "dt", "gate"):
    getattr(two, name).kernel[...] = getattr(one, name).kernel[...]
  for name in ("dt_bias", "A_log", "D"):
    getattr(two, name)[...] = getattr(one, name)[...]
  B, C = jnp.split(one.BC.kernel[...], 2, axis=1)
  two.BC.kernel[...] = jnp.concatenate([B, B, C, C], axis=1)
  for mixer in (one, two):
    mixer.output = lambda y, x: y
  run = jax.jit(lambda mixer, x: mixer.mix(x, None, None)[0])
  assert rel_rms(run(two, x), run(one, x)) < 1e-12


def test_mlstm_state_equals_the_formula_without_rescaling():
  """S e^m equals the recurrence with plain exponentials."""
  mixer, x = make("mlstm")
  state = mixer.init_state(1, L, "float64")
  _, state = jax.jit(lambda mixer, x, s: mixer.mix(x, None, s))(mixer, x[:1], state)
  S, z, m = (np.asarray(state[name][0], np.float64) for name in ("S", "z", "m"))
  weights = lambda layer: np.asarray(layer.kernel[...])
  u = np.asarray(x[0])
  gate = lambda layer, bias: 15 * np.tanh((u @ weights(layer) + np.asarray(bias[...])) / 15)
  i, f = gate(mixer.input, mixer.input_bias), gate(mixer.forget, mixer.forget_bias)
  k, v = ((u @ weights(layer)).reshape(L, 2, -1) for layer in (mixer.qkv.k, mixer.qkv.v))
  want = np.zeros_like(S)
  for t in range(L):
    for h in range(2):
      want[h] = want[h] / (1 + np.exp(-f[t, h])) + np.exp(i[t, h]) * np.outer(k[t, h], v[t, h])
  assert rel_rms(S * np.exp(m)[:, None, None], want) < 1e-12
  assert z.shape == S.shape[:2]


def test_running_max_resets_at_segment_starts():
  rng = np.random.default_rng(0)
  log_f, log_i, m0 = -rng.random((2, 7, 3)), rng.standard_normal((2, 7, 3)), rng.random((2, 3))
  ids = np.array([[1, 1, 2, 2, 2, 1, 3], [5] * 7], np.int32)
  m, before = m0.copy(), np.zeros_like(log_f)
  want = np.zeros_like(log_f)
  for t in range(7):
    if t:
      m = np.where((ids[:, t] != ids[:, t - 1])[:, None], 0, m)
    before[:, t] = m
    m = want[:, t] = np.maximum(log_f[:, t] + m, log_i[:, t])
  got = jax.jit(running_max)(*map(jnp.asarray, (log_f, log_i, m0, ids)))
  assert max(map(rel_rms, got, (before, want))) < 1e-15


def test_rwkv6_without_decay_and_with_bonus_one_is_linear_attention():
  mixer, x = make("rwkv6")
  mixer = jax.tree.map(lambda w: w, mixer)
  mixer.decay[...], mixer.bonus[...] = jnp.full(D, -100.0), jnp.ones(D)
  mixer.shares[...], mixer.shift_up[...] = jnp.zeros((5, D)), jnp.zeros_like(mixer.shift_up[...])

  @jax.jit
  def run(mixer, x):
    q, k, v = (layer(x).reshape(*x.shape[:2], 2, -1) for layer in (mixer.r, mixer.k, mixer.v))
    o, _ = linear_attention(q, k, v, chunk=4)
    return mixer(x), mixer.out(mixer.norm(o) * jax.nn.silu(mixer.g(x)))

  assert rel_rms(*run(mixer, x)) < 1e-12


def test_hgrn2_with_a_lower_bound_equals_the_reference():
  mixer, x = make("hgrn2")
  gamma = np.random.default_rng(0).random(D)
  gamma[0] = 0

  @jax.jit
  def run(*inputs):
    f = lambda mixer, x, gamma: mixer.mix(x, None, None, lower_bound=gamma)[0]
    y, pull = jax.vjp(f, *inputs)
    return y, pull(jnp.ones_like(y))

  got, grads = run(mixer, x[:1], jnp.asarray(gamma))
  assert rel_rms(got[0], hgrn2.plain(mixer, np.asarray(x[0]), gamma)) < 1e-9
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
