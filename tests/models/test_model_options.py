"""Model options that some mixers need: channel mix, LayerNorm, lower bounds, capped logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from deltanet_jax.mixers import Layer, build_mixer, mixer_config
from deltanet_jax.models import build, preset
from deltanet_jax.models.channel_mix import ChannelMix
from deltanet_jax.models.chunked_logits import batch_totals
from deltanet_jax.models.hgrn2_lower_bounds import LowerBounds
from deltanet_jax.ops.matmul import matmul
from deltanet_jax.ops.testing import rel_rms
from tests.support.models import random_model

B, L, SPLIT = 2, 9, 5
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (B, L)), jnp.int32)
IDS = jnp.asarray(np.repeat([1, 2], [SPLIT, L - SPLIT])[None].repeat(B, axis=0), jnp.int32)


@pytest.mark.parametrize("name", ["rwkv6-tiny", "rwkv4-tiny", "hgrn2-tiny", "mlstm-tiny"])
def test_decoding_and_segments(name):
  model = random_model(preset(name, dtype="float64", depth=2), "float64")

  @jax.jit
  def run(model, tokens):
    first, state = model.prefill(tokens[:, :SPLIT], model.init_state(B, L))
    step = lambda state, t: model.step(t, state)[::-1]
    _, rest = lax.scan(step, state, tokens[:, SPLIT:].T)
    decoded = jnp.concatenate([first, jnp.moveaxis(rest, 0, 1)], axis=1)
    return model(tokens), decoded, model(tokens, IDS)[:, SPLIT:], model(tokens[:, SPLIT:])

  full, decoded, second, separate = run(model, TOKENS)
  assert rel_rms(decoded, full) < 1e-10
  assert rel_rms(second, separate) < 1e-10


def test_lower_bounds_rise_over_hgrn2_layers():
  logits = np.random.default_rng(0).standard_normal((3, 2))
  bounds = LowerBounds([True, False, False, True, False, True], 2)
  bounds.logits[...] = jnp.asarray(logits, jnp.float32)
  shares = np.exp(logits) / np.exp(logits).sum(axis=0)
  gamma = np.cumsum(shares, axis=0) - shares[0]
  # A unit of two layers, then one of two layers that is repeated twice.
  (first, nothing), (none, others) = bounds([(2, 1), (2, 2)])
  assert nothing is None and none is None
  np.testing.assert_array_equal(first, np.zeros((1, 2)))
  assert rel_rms(others, gamma[1:]) < 1e-6


def test_channel_mix_equals_the_formula():
  rng = np.random.default_rng(0)
  make = lambda: ChannelMix(6, 8, "rwkv6", Layer(), std=0.1, rngs=nnx.Rngs(params=0))
  draw = lambda x: jnp.asarray(rng.standard_normal(x.shape))
  mix, x = jax.tree.map(draw, jax.eval_shape(make)), rng.standard_normal((1, 7, 6))
  previous = np.concatenate([np.zeros((1, 1, 6)), x[:, :-1]], axis=1)
  weights = lambda weight: np.asarray(weight[...])
  mixed = lambda share: x + (previous - x) * weights(share)
  k = np.maximum(mixed(mix.k_share) @ weights(mix.k.kernel), 0) ** 2
  r = 1 / (1 + np.exp(-mixed(mix.r_share) @ weights(mix.r.kernel)))
  want = r * (k @ weights(mix.v.kernel))
  got, last = jax.jit(lambda mix, x: mix(x, None, None))(mix, jnp.asarray(x))
  assert rel_rms(got, want) < 1e-13
  np.testing.assert_array_equal(last, x[:, -1])


def test_loss_uses_capped_logits():
  model = random_model(preset("mlstm-tiny", depth=1, logit_cap=0.5), std=0.3)

  @jax.jit
  def run(model):
    x, _ = model.features(TOKENS)
    batch = dict(tokens=TOKENS[:, :-1], targets=TOKENS[:, 1:], segment_ids=IDS[:, 1:] * 0)
    totals = batch_totals(model, batch | dict(mask=TOKENS[:, 1:] >= 0), 4)
    return matmul(x, model.head_kernel(), True), model(TOKENS), totals["loss"]

  raw, logits, loss = run(model)
  assert np.abs(raw).max() > 1
  np.testing.assert_allclose(logits, 0.5 * np.tanh(np.asarray(raw) / 0.5), rtol=1e-5)
  p = jax.nn.log_softmax(logits[:, :-1], axis=-1)
  want = -jnp.take_along_axis(p, TOKENS[:, 1:, None], axis=-1).sum()
  assert abs(loss - want) < 1e-3


def test_rwkv_initialization_depends_on_the_layer():
  """Published initial values in layer l of 4 and channel i of 8."""
  i = np.arange(8)
  for l in (0, 2):
    options = dict(layer=Layer(l, 4), rngs=nnx.Rngs(params=0))
    rise, fall = l / 3, 1 - l / 4
    four = build_mixer(mixer_config("rwkv4")(), 8, **options)
    six = build_mixer(mixer_config("rwkv6")(head_size=4), 8, **options)
    wave = (i + 1) % 3 - 1
    for got, want in (
      (four.k_share, 1 - (i / 8) ** fall),
      (four.v_share, 1 - ((i / 8) ** fall + 0.3 * rise)),
      (four.r_share, 1 - (i / 8) ** (0.5 * fall)),
      (four.decay, -5 + 8 * (i / 7) ** (0.7 + 1.3 * rise)),
      (four.bonus, np.log(0.3) + 0.5 * wave),
      (six.decay, -6 + 5 * (i / 7) ** (0.7 + 1.3 * rise)),
      (six.bonus, rise * (1 - i / 7) + 0.1 * wave),
      (six.norm.scale, np.full(8, ((1 + l) / 4) ** 0.7)),
    ):
      np.testing.assert_allclose(got[...], want, atol=1e-6)
    np.testing.assert_allclose(six.shares[2], 1 - ((i / 8) ** fall + 0.3 * rise), atol=1e-6)


def test_layer_index_counts_all_layers_of_the_model():
  cfg = preset("rwkv4-tiny", depth=3, width=8)
  cfg.mixers["window"] = mixer_config("attention")(head_size=4, window=4)
  cfg.pattern = ("window", "rwkv4", "rwkv4")
  model = jax.jit(lambda: build(cfg))()
  decay = model.stacks[1].unit.blocks[0].mixer.decay[...]
  at = np.arange(8) / 7
  want = [-5 + 8 * at ** (0.7 + 1.3 * l / 2) for l in (1, 2)]
  np.testing.assert_allclose(decay, want, atol=1e-5)
