"""Models of the synthetic benchmarks against a NumPy reference."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from deltanet_jax.config import ModelConfig
from deltanet_jax.mixers import mixer_config
from deltanet_jax.models import build, count_parameters, summarize
from deltanet_jax.ops.testing import rel_rms
from tests.mixers.numpy_reference import array, attention, deltanet, linear
from tests.support.models import random_model

B, L, V, D = 2, 7, 11, 8
TOKENS = np.random.default_rng(0).integers(0, V, (B, L)).astype(np.int32)
SMALL = dict(vocab=V, width=D, depth=2, dtype="float64", norm_eps=1e-5)
ATTENTION = mixer_config("attention")(head_size=4, rope_base=None, bias=True)
DELTANET = mixer_config("deltanet")(heads=2, key_size=4, value_size=4, chunk=4)
SHELLS = {
  "mqar": ModelConfig(
    mixers={"attention": ATTENTION},
    pattern=("attention",),
    mlp="identity",
    norm="layer",
    tied=True,
    positions=L,
    **SMALL,
  ),
  "regbench": ModelConfig(
    mixers={"deltanet": DELTANET}, pattern=("deltanet",), mlp="gelu", norm="layer", **SMALL
  ),
  "compression": ModelConfig(
    mixers={"deltanet": DELTANET},
    pattern=("deltanet",),
    mlp_ratio=0.0,
    autoencoder=2,
    head_bias=True,
    **SMALL,
  ),
}


def layer_norm(layer, x):
  x = x - x.mean(axis=-1, keepdims=True)
  return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * array(layer.scale)


def norm(layer, x):
  """LayerNorm if the layer has a bias, otherwise RMSNorm."""
  if hasattr(layer, "bias"):
    return layer_norm(layer, x) + array(layer.bias)
  return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * array(layer.scale)


def tanh_gelu(x):
  return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x):
  return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def plain(model, tokens):
  """Logits of one sequence."""
  x = array(model.embedding)[tokens]
  if model.positions is not None:
    x = x + array(model.positions)[: len(tokens)]
  (stack,) = model.stacks
  for i in range(stack.times):
    (block,) = jax.tree.map(lambda w: w[i], stack.unit).blocks
    mixer = attention if block.mixer.cfg.kind == "attention" else deltanet
    x = x + mixer.plain(block.mixer, norm(block.mixer_norm, x))
    if block.mlp is not None:
      y = tanh_gelu(linear(block.mlp.up, norm(block.mlp_norm, x)))
      x = x + linear(block.mlp.down, y)
    elif block.mlp_norm is not None:
      x = x + norm(block.mlp_norm, x)
  if model.decoder is not None:
    d = D // 2
    angle = np.arange(len(x))[:, None] / 10000 ** (np.arange(d) / (d - 1))
    x = x[-1] + np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    for one, layer in zip(model.decoder.norms, model.decoder.layers):
      x = gelu(linear(layer, norm(one, x)))
  x = norm(model.norm, x)
  return x @ array(model.embedding).T if model.head is None else linear(model.head, x)


@pytest.mark.parametrize("name", SHELLS)
def test_model_equals_the_reference(name, monkeypatch):
  # The reference mixers have the default epsilon, 1e-6, as a literal.
  monkeypatch.setattr(deltanet, "head_output", head_output)
  model = random_model(SHELLS[name], "float64", std=0.4)
  logits = jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(TOKENS))
  for got, tokens in zip(logits, TOKENS):
    assert rel_rms(got, plain(model, tokens)) < 1e-9
  assert summarize(SHELLS[name], L).parameters == count_parameters(SHELLS[name])


def head_output(output, o, x):
  scale, y = array(output.norm.scale), o / np.sqrt((o * o).mean(axis=-1, keepdims=True) + 1e-5)
  return linear(output.out, (y * scale).reshape(len(x), -1))


def test_learned_positions_continue_in_decoding_and_restart_in_segments():
  model = random_model(SHELLS["mqar"], "float64", std=0.4)
  ids = jnp.asarray(np.repeat([1, 2], [3, L - 3])[None].repeat(B, axis=0), jnp.int32)

  @jax.jit
  def run(model, tokens):
    first, state = model.prefill(tokens[:, :3], model.init_state(B, L))
    _, rest = lax.scan(lambda state, t: model.step(t, state)[::-1], state, tokens[:, 3:].T)
    decoded = jnp.concatenate([first, jnp.moveaxis(rest, 0, 1)], axis=1)
    return model(tokens), decoded, model(tokens, ids)[:, 3:], model(tokens[:, 3:])

  full, decoded, second, separate = run(model, jnp.asarray(TOKENS))
  assert rel_rms(decoded, full) < 1e-10 and rel_rms(second, separate) < 1e-10
  with pytest.raises(
    ValueError, match="sequence length is 9, but the model has 7 learned position embeddings"
  ):
    jax.eval_shape(model, jnp.zeros((1, 9), jnp.int32))


def test_an_autoencoder_cannot_decode():
  model = jax.eval_shape(lambda: build(SHELLS["compression"]))
  with pytest.raises(
    ValueError, match="an autoencoder predicts a sequence from its last hidden state"
  ):
    model.init_state(1, 4)
  assert summarize(SHELLS["compression"]).state == 0


def test_output_init_and_conv_std():
  cfg = dataclasses.replace(SHELLS["regbench"], mlp_inner=6, dtype="float32")
  scaled = dict(output_init="all", conv_std=0.5)
  make = jax.jit(lambda: [build(dataclasses.replace(cfg, **x)) for x in ({}, scaled)])
  plain, changed = (model.stacks[0].unit.blocks[0] for model in make())
  ratio = lambda get: np.asarray(get(changed)[...]) / np.asarray(get(plain)[...])
  smaller = (2 * cfg.depth) ** -0.5
  np.testing.assert_allclose(ratio(lambda b: b.mixer.output.out.kernel), smaller, rtol=1e-6)
  np.testing.assert_allclose(ratio(lambda b: b.mlp.down.kernel), smaller, rtol=1e-6)
  np.testing.assert_allclose(ratio(lambda b: b.mixer.qkv.k_conv.kernel), 0.5 / 0.02, rtol=1e-6)
  np.testing.assert_allclose(ratio(lambda b: b.mixer.qkv.k.kernel), 1)
  np.testing.assert_allclose(ratio(lambda b: b.mlp.up.kernel), 1)


@pytest.mark.parametrize(
  "changes,message",
  [
    (dict(tied=True, head_bias=True), "tied and head_bias"),
    (dict(autoencoder=1, width=7), "width is 7, expected an even number"),
    (dict(embedding_dropout=1.0), "embedding_dropout is 1.0"),
  ],
)
def test_contradictory_configs_raise(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(SHELLS["regbench"], **changes).validate()
