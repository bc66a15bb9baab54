"""Special cases of linear attention, gated RFA, DFW, ABC and GSA, and feature maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from deltanet_jax.mixers import mixer_config
from deltanet_jax.mixers.feature_maps import FeatureMap
from deltanet_jax.mixers.gated_rfa import directions
from deltanet_jax.ops import linear_attention
from deltanet_jax.ops.testing import rel_rms
from tests.mixers.numpy_reference.linear_attention import plain
from tests.support.mixers import B, L, draw_mixer, make

run = jax.jit(lambda mixer, x: mixer(x))


@pytest.mark.parametrize(
  "settings",
  [
    dict(feature_map="elu", sum_norm=True),
    dict(feature_map="relu", normalize=True, sum_norm=True),
    dict(feature_map="t2r"),
    dict(feature_map="hadamard", expand_v=1.5),
    dict(feature_map="dpfp", dpfp_nu=2, normalize=True),
    dict(feature_map="taylor", expand_k=0.5, normalize=True),
  ],
  ids=lambda settings: settings["feature_map"],
)
def test_every_feature_map_equals_the_reference(settings):
  cfg = mixer_config("linear_attention")(heads=2, chunk=4, **settings)
  cfg.validate()
  mixer, x = draw_mixer(cfg)
  assert rel_rms(run(mixer, x)[0], plain(mixer, np.asarray(x[0]))) < 1e-9
  state = jax.eval_shape(lambda: mixer.init_state(B, L, "float64"))
  assert ("z" in state) == cfg.normalize
  assert state["S"].size == B * mixer.recurrent_state()


def test_taylor_features_expand_the_exponential_to_second_order():
  x, y = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 8))
  phi = FeatureMap("taylor", 8, nu=1, std=1.0, rngs=None)
  s = (x * y).sum() / np.sqrt(8)
  assert abs((phi(jnp.asarray(x)) * phi(jnp.asarray(y))).sum() - (1 + s + s * s / 2)) < 1e-12


def test_hedgehog_initializes_to_the_identity():
  phi = FeatureMap("hedgehog", 3, nu=1, std=1.0, rngs=nnx.Rngs(params=0))
  x = jnp.asarray([[[[0.0, 1.0, -2.0]]]])
  want = jax.nn.softmax(jnp.asarray([0.0, 2.0, -4.0, 0.0, -2.0, 4.0]))
  np.testing.assert_allclose(phi(x)[0, 0, 0], want, rtol=1e-6)


@pytest.mark.parametrize(
  "name,feature_map", [("sum_norm", "taylor"), ("sum_norm", "identity"), ("normalize", "hadamard")]
)
def test_signed_feature_maps_cannot_be_normalized(name, feature_map):
  cfg = mixer_config("linear_attention")(feature_map=feature_map, **{name: True})
  with pytest.raises(ValueError, match=f"{name} divides by a sum that may vanish"):
    cfg.validate()


def test_random_features_approximate_a_gaussian_kernel():
  cfg = mixer_config("gated_rfa")(heads=1, head_size=8, features=20_000)
  mixer, _ = draw_mixer(cfg)
  mixer.sharpness[...] = jnp.ones((1, 8))
  x = np.random.default_rng(0).standard_normal((1, 2, 1, 8)) * 1e4
  unit = (x / np.linalg.norm(x, axis=-1, keepdims=True))[0, :, 0]
  phi = np.asarray(mixer.features(jnp.asarray(x)))[0, :, 0]
  np.testing.assert_allclose((phi * phi).sum(axis=1), 1, rtol=1e-12)
  kernel = np.exp(-((unit[0] - unit[1]) ** 2).sum() / 2)
  assert abs(phi[0] @ phi[1] - kernel) < 0.02
  assert directions(0, 1, 4, 8) is directions(0, 1, 4, 8)
  assert not np.allclose(directions(0, 1, 4, 8), directions(1, 1, 4, 8))


def test_gated_rfa_has_finite_gradients_at_zero_and_a_bounded_normalizer():
  mixer, x = make("gated_rfa")
  mixer = jax.tree.map(lambda w: w, mixer)
  for into in (mixer.qkv.q, mixer.qkv.k):
    into.bias[...] = jnp.zeros_like(into.bias[...])
  grads = jax.jit(jax.grad(lambda mixer, x: mixer(x).sum()))(mixer, 0 * x)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
  # A decay of 1 writes nothing: the normalizer is 0 and takes its lower bound.
  mixer.decay.bias[...] = jnp.full_like(mixer.decay.bias[...], 1e3)
  np.testing.assert_allclose(run(mixer, x), jnp.broadcast_to(mixer.out.bias[...], x.shape))


def test_dfw_without_value_decay_is_decayed_linear_attention():
  mixer, x = make("dfw")
  mixer = jax.tree.map(lambda w: w, mixer)
  mixer.beta.kernel[...] = jnp.zeros_like(mixer.beta.kernel[...])
  mixer.beta.bias[...] = jnp.full_like(mixer.beta.bias[...], 60.0)
  per_head = lambda y: y.reshape(B, L, 2, -1)
  q, k, v, logits = (per_head(f(x)) for f in (mixer.qkv.q, mixer.qkv.k, mixer.qkv.v, mixer.alpha))
  o, _ = linear_attention(q, k, v, g=jax.nn.log_sigmoid(logits), scale=6**-0.5, chunk=4)
  assert rel_rms(run(mixer, x), mixer.output(o, x)) < 1e-12


@pytest.mark.parametrize("name", ["abc", "gsa"])
def test_equal_slots_hold_a_mean_of_the_values(name):
  """With zero logits: the mean of all earlier tokens for ABC, an exponential average for GSA."""
  mixer, x = make(name)
  mixer = jax.tree.map(lambda w: w, mixer)
  mixer.slots.kernel[...] = jnp.zeros_like(mixer.slots.kernel[...])
  age = np.arange(L)[:, None] - np.arange(L)[None]
  if name == "abc":
    weights = (age >= 0) / np.arange(1, L + 1)[:, None]
    v = mixer.qkv.v(x)
  else:
    a = 0.5 ** (1 / 8)
    weights = np.where(age >= 0, (1 - a) * a ** np.abs(age), 0)
    v = jax.nn.silu(mixer.qkv.v(x))
  o = jnp.einsum("ij,bjd->bid", jnp.asarray(weights), v)
  if name == "abc":
    want = mixer.output(o.reshape(B, L, 2, -1), x)
  else:
    want = mixer.out(mixer.norm(jax.nn.silu(o)))
  assert rel_rms(run(mixer, x), want) < 1e-12
