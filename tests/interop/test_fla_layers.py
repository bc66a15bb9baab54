"""FLA checkpoints of Gated DeltaNet and hybrids: names, logits, unsupported models."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from deltanet_jax.config import ModelConfig
from deltanet_jax.interop import load_fla, save_fla
from deltanet_jax.interop.fla import from_fla, to_fla
from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.mixers.gated_deltanet import GatedDeltaNetConfig
from deltanet_jax.models import preset
from deltanet_jax.models.build import abstract, count_parameters
from tests.support import plain_deltanet
from tests.support.models import random_model

SINGLE = "model.safetensors"
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# Small sizes, then the defaults that the public config class writes.
GATED = dict(
  model_type="gated_deltanet",
  architectures=["GatedDeltaNetForCausalLM"],
  vocab_size=97,
  hidden_size=32,
  num_hidden_layers=1,
  num_heads=2,
  head_dim=8,
  intermediate_size=48,
  expand_v=2.0,
  num_v_heads=None,
  use_gate=True,
  use_short_conv=True,
  allow_neg_eigval=False,
  conv_size=4,
  attn=None,
  attn_mode="chunk",
  max_position_embeddings=2048,
  hidden_ratio=4,
  hidden_act="swish",
  norm_eps=1e-6,
  use_cache=True,
  pad_token_id=None,
  bos_token_id=1,
  eos_token_id=2,
  tie_word_embeddings=False,
  initializer_range=0.02,
  fuse_norm=True,
  fuse_swiglu=True,
  fuse_cross_entropy=True,
  fuse_linear_cross_entropy=False,
  use_l2warp=False,
  dtype="float32",
)
DELTA = json.loads((GOLDEN / "model_f32_T40/config.json").read_text())
DELTA |= dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1)
WINDOW = dict(layers=[1, 3], num_heads=4, num_kv_heads=2, window_size=3, qkv_bias=False)
GLOBAL = dict(layers=[1], num_heads=2)

OPTIONS = {
  "gated": GATED,
  "gated_other": GATED
  | dict(use_gate=False, use_short_conv=False, allow_neg_eigval=True, expand_v=1.5),
  # Attention in every second layer, as in the presets; then three kinds without a period.
  "gated_window": GATED | dict(num_hidden_layers=4, attn=WINDOW | dict(rope_theta=100.0)),
  "gated_global": GATED | dict(num_hidden_layers=3, attn=GLOBAL, tie_word_embeddings=True),
  "delta_window": DELTA | dict(num_hidden_layers=4, attn=WINDOW),
  "delta_both": DELTA
  | dict(
    num_hidden_layers=6,
    attn=[GLOBAL | dict(layers=[2]), dict(layers=[3, 5], num_heads=4, window_size=2)],
  ),
}


def relative(x, ref):
  return float(np.abs(np.asarray(x, np.float64) - ref).max() / np.abs(ref).max())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_equal_the_formulas_and_saving_is_bitwise(options, tmp_path):
  # Large parameters, so that every option changes the result.
  model = random_model(from_fla(options), std=0.3)
  save_fla(model, tmp_path)
  again = load_fla(tmp_path, dtype="float64")
  assert again.cfg.mixers == model.cfg.mixers and again.cfg.pattern == model.cfg.pattern
  for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(x, y)

  tokens = np.random.default_rng(0).integers(0, 97, 7)
  tensors = safetensors.numpy.load_file(tmp_path / SINGLE)
  want = plain_deltanet.logits(tokens, tensors, options)
  # The written file and the original options give the same logits.
  written = json.loads((tmp_path / "config.json").read_text())
  np.testing.assert_array_equal(plain_deltanet.logits(tokens, tensors, written), want)
  got = jax.jit(lambda model, tokens: model(tokens))(again, jnp.asarray(tokens[None], jnp.int32))
  assert relative(got[0], want) < 1e-12


def test_the_plain_recurrence_is_the_golden_operator():
  golden = dict(np.load(GOLDEN / "gdn_f32_T65.npz"))
  inputs = {name: golden[name][0].astype(np.float64) for name in ("q", "k", "v", "beta", "g", "h0")}
  q, k = (plain_deltanet.NORMS["l2"](inputs[name]) for name in "qk")
  y, S = plain_deltanet.delta_rule(q, k, *(inputs[name] for name in ("v", "beta", "g", "h0")))
  assert relative(golden["fla_naive_o"][0], y) < 2e-6
  assert relative(golden["fla_naive_ht"][0], S) < 2e-6


def test_names_and_shapes_are_the_public_ones(tmp_path):
  attn = dict(layers=[1], num_heads=4, num_kv_heads=2, window_size=8)
  save_fla(random_model(from_fla(GATED | dict(num_hidden_layers=2, attn=attn))), tmp_path)
  shapes = {n: x.shape for n, x in safetensors.numpy.load_file(tmp_path / SINGLE).items()}
  shared = dict(attn_norm=(32,), mlp_norm=(32,))
  shared |= {"mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
  gated = {
    "q_proj": (16, 32),
    "k_proj": (16, 32),
    "v_proj": (32, 32),
    "a_proj": (2, 32),
    "b_proj": (2, 32),
    "g_proj": (32, 32),
    "q_conv1d": (16, 1, 4),
    "k_conv1d": (16, 1, 4),
    "v_conv1d": (32, 1, 4),
    "o_norm": (16,),
    "o_proj": (32, 32),
  }
  attention = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
  want = {f"{name}.weight": (97, 32) for name in ("model.embeddings", "lm_head")}
  want["model.norm.weight"] = (32,)
  want |= {f"model.layers.0.attn.{name}": (2,) for name in ("A_log", "dt_bias")}
  for i, own in enumerate((gated, attention)):
    want |= {f"model.layers.{i}.attn.{name}.weight": shape for name, shape in own.items()}
    want |= {f"model.layers.{i}.{name}.weight": shape for name, shape in shared.items()}
  assert shapes == want


@pytest.mark.parametrize(
  "name", ["gated-deltanet-1.3b", "deltanet-sliding-1.3b", "deltanet-global-340m", "deltanet-3b"]
)
def test_presets_survive_conversion_to_config_json(name):
  cfg = preset(name)
  again = from_fla(to_fla(cfg))
  assert count_parameters(again) == count_parameters(cfg)
  assert len(again.pattern) == len(cfg.pattern)  # repeated layers are still compiled once
  # Head counts may be None (derived from the width), so compare the layers instead.
  kinds = lambda cfg: [type(cfg.mixers[name]) for name in cfg.layers]
  windows = lambda cfg: [getattr(cfg.mixers[name], "window", None) for name in cfg.layers]
  assert kinds(again) == kinds(cfg) and windows(again) == windows(cfg)


def test_published_configs_are_supported():
  """Options of published files: DeltaNet 1.3B, and Gated DeltaNet derived from it."""
  published = dict(
    _name_or_path="fla-hub/delta_net-1.3B-100B",
    architectures=["DeltaNetForCausalLM"],
    attn=None,
    attn_mode="chunk",
    bos_token_id=1,
    conv_size=4,
    eos_token_id=2,
    expand_k=1,
    expand_v=1,
    fuse_cross_entropy=True,
    hidden_act="swish",
    hidden_ratio=4,
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=None,
    max_position_embeddings=2048,
    model_type="delta_net",
    norm_eps=1e-06,
    norm_first=False,
    num_heads=16,
    num_hidden_layers=24,
    pad_token_id=2,
    qk_activation="silu",
    qk_norm="l2",
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.45.2",
    use_beta=True,
    use_cache=True,
    use_gate=False,
    use_output_norm=True,
    use_short_conv=True,
    vocab_size=32000,
  )
  assert count_parameters(from_fla(published)) == 1_365_677_056
  gated = dict(model_type="gated_deltanet", num_heads=6, head_dim=256, expand_v=2, use_gate=True)
  cfg = from_fla(published | gated | dict(num_hidden_layers=21))
  assert count_parameters(cfg) == count_parameters(preset("gated-deltanet-1.3b"))


UNSUPPORTED = {
  "value heads": (dict(num_v_heads=4), "num_v_heads = 4, expected num_heads = 2"),
  "expand": (dict(expand_v=1.3), "expand_v 1.3 and head_dim 8"),
  "depth": (dict(num_hidden_layers="1"), "num_hidden_layers = '1', expected a positive integer"),
  "norm": (dict(qk_norm="sum"), "qk_norm = 'sum', the only supported value is 'l2'"),
  "no layers": (dict(attn=dict(num_heads=2)), r"attn without \['layers'\]"),
  "attn text": (dict(attn="all"), "attn = 'all'"),
  "bias": (dict(attn=GLOBAL | dict(layers=[0], qkv_bias=True)), "qkv_bias = True"),
  "heads": (dict(attn=dict(layers=[0], num_heads=3)), "num_heads = 3, expected a divisor of 32"),
  "theta": (dict(attn=dict(layers=[0], num_heads=2, rope_theta=None)), "rope_theta = None"),
  "beyond": (dict(attn=GLOBAL), "attn in layer 1, expected one of 0 to 0"),
  "twice": (dict(attn=[GLOBAL | dict(layers=[0])] * 2), "attn in layer 0 twice"),
  "unknown": (
    dict(attn=GLOBAL | dict(layers=[0], sink=1)),
    r"attn with unsupported options \['sink'\]",
  ),
}


@pytest.mark.parametrize("changes,message", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_layers_raise(changes, message):
  with pytest.raises(ValueError, match=message):
    from_fla(GATED | changes)


NOT_SAVED = {
  "attention alone": (preset("transformer-tiny"), "AttentionConfig"),
  "another mixer": (preset("gla-tiny"), "GLAConfig"),
  "two kinds": (
    preset(
      "deltanet-tiny",
      mixers=dict(a=DeltaNetConfig(), b=GatedDeltaNetConfig()),
      pattern=("a", "b"),
    ),
    "only one kind",
  ),
  "narrow heads": (
    ModelConfig(
      width=64,
      depth=2,
      mixers=dict(a=DeltaNetConfig(key_size=16), b=AttentionConfig(heads=3, head_size=16)),
      pattern=("a", "b"),
    ),
    "3 heads of size 16; the format supports only heads .* = 64",
  ),
}


@pytest.mark.parametrize("cfg,message", NOT_SAVED.values(), ids=NOT_SAVED)
def test_models_outside_the_format_raise(cfg, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    save_fla(abstract(cfg), tmp_path)


def test_ratios_survive_rounding():
  """49 * (1 / 49) is less than 1, and readers truncate the product to an integer."""
  cfg = preset("gated-deltanet-tiny", key_size=49, value_size=1)
  (mixer,) = from_fla(to_fla(cfg)).mixers.values()
  assert (mixer.key_size, mixer.value_size) == (49, 1)
