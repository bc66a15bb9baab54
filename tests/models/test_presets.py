"""Presets: exact parameter counts and state sizes, layer patterns, changed fields."""

import pytest

from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.models import PRESETS, preset, summarize
from deltanet_jax.models.stack import Repeat, find_repeats

V = 32000


def model(d, layers, mixer, inner):
  """Parameters of an untied model: norms, mixer and MLP per layer, final norm, embedding, head."""
  per_layer = mixer + d + (3 * d * inner + d if inner else 0)
  return layers * per_layer + d + 2 * V * d


# Parameters of one mixer, from its definition.
def deltanet(d, conv=4):
  return 4 * d * d + d * (d // 128) + 3 * conv * d + 128


def gated_deltanet(d, H):
  return d * (2 * 256 * H + 3 * 512 * H + 2 * H) + 2 * H + 4 * (2 * 256 + 512) * H + 512


def deltaproduct(d, H, n):
  return gated_deltanet(d, H) + (n - 1) * H * ((256 + 512) * (d + 4) + d)


def kda(d):
  H = d // 128
  return 4 * d * d + d * H + 12 * d + 2 * 2 * 128 * d + H + 2 * d + 128


def block_deltanet(d):
  return 4 * d * d + d * (d // 512) + 12 * d + 512


def gla(d, conv=0):
  return 4 * d * d + d * 16 + 16 * d // 2 + d // 2 + d // 4 + conv * 2 * d


def mamba(d, conv=4):
  r, c = d // 16, 2 * d
  return d * 2 * c + (conv + bool(conv)) * c + c * (r + 32) + r * c + c + c * 16 + c + c * d


def gated_rfa(d):
  return 4 * (d * d + d) + (d + 1) * (d // 64) + d


def dfw(d):
  return 7 * d * d + 2 * d + 64


def gsa(d):
  return 4 * d * d + d * 4 * 64 + d


def abc(d):
  return 4 * d * d + d * 4 * 64 + d // 4


def mamba2(d):
  c, N, H = 2 * d, 128, 2 * d // 64
  return d * (2 * c + 2 * N + H) + 5 * (c + 2 * N) + 3 * H + c + c * d


def mlstm(d):
  return 4 * d * d + 2 * (4 * d + 4) + d


def hgrn2(d):
  return 4 * d * d + d


def rwkv4(d):
  return 4 * d * d + 5 * d


def rwkv6(d):
  return 5 * d * d + 2 * d * 5 * 32 + 2 * d * 64 + 6 * d + 4 * d


def rwkv_model(d, layers, mixer, inner):
  """Parameters with LayerNorms, also after the embedding, and a channel mix with token shift."""
  per_layer = mixer + 4 * d + 2 * d * inner + d * d + 2 * d
  return layers * per_layer + 4 * d + 2 * V * d


def s4d(d):
  return 2 * d * d + 2 * d + d * (1 + 4 * 32 + 1)


def hyena(d, filters):
  """Projections, short convolution of width 3, filter MLP, and one skip weight per filter."""
  network = 33 * 64 + 2 * 64 * 64 + 3 * 64 + 64 + 64 * filters
  return 4 * d * d + 4 * d + 3 * 3 * d + 3 * d + network + filters


# name: (parameters, the published count in millions, if any)
SIZES = {
  "transformer-340m": (model(1024, 24, 4 * 1024**2, 2816), 373.9),
  "deltanet-340m": (374_362_112, 374.4),
  "deltanet-noconv-340m": (model(1024, 24, deltanet(1024, 0), 2816), None),
  "gla-340m": (model(1024, 24, gla(1024), 2816), 374.5),
  "gla-conv-340m": (model(1024, 24, gla(1024, 4), 2816), None),
  "retnet-340m": (model(1024, 24, 8 * 1024**2 + 512, 1536), 380.2),
  "mamba-340m": (model(1024, 48, mamba(1024), 0), 385.6),
  "mamba-noconv-340m": (model(1024, 48, mamba(1024, 0), 0), None),
  "gated-deltanet-340m": (model(1024, 21, gated_deltanet(1024, 3), 2816), 379.8),
  "linear-attention-340m": (model(1024, 24, 4 * 1024**2 + 256, 2816), 373.9),
  "gated-rfa-340m": (model(1024, 24, gated_rfa(1024), 2816), None),
  "dfw-340m": (model(1024, 24, dfw(1024), 2816), None),
  "abc-340m": (model(1024, 24, abc(1024), 2816), 380.2),
  "gsa-340m": (model(1024, 24, gsa(1024), 2816), 380.2),
  "deltaproduct-340m": (model(1024, 21, deltaproduct(1024, 3, 2), 2816), None),
  "kda-340m": (model(1024, 24, kda(1024), 2816), 387.0),
  "block-deltanet-340m": (model(1024, 24, block_deltanet(1024), 2816), None),
  "transformer-1.3b": (model(2048, 24, 4 * 2048**2, 5632), 1364.3),
  "deltanet-1.3b": (1_365_677_056, 1365.7),
  "deltanet-noconv-1.3b": (model(2048, 24, deltanet(2048, 0), 5632), None),
  "gla-1.3b": (model(2048, 24, gla(2048), 5632), 1365.5),
  "gla-conv-1.3b": (model(2048, 24, gla(2048, 4), 5632), None),
  "retnet-1.3b": (model(2048, 24, 8 * 2048**2 + 512, 2816), 1351.7),
  "mamba-1.3b": (model(2048, 48, mamba(2048), 0), 1400.3),
  "mamba-noconv-1.3b": (model(2048, 48, mamba(2048, 0), 0), None),
  "gated-deltanet-1.3b": (model(2048, 21, gated_deltanet(2048, 6), 5632), 1387.3),
  "linear-attention-1.3b": (model(2048, 24, 4 * 2048**2 + 512, 5632), None),
  "gated-rfa-1.3b": (model(2048, 24, gated_rfa(2048), 5632), None),
  "dfw-1.3b": (model(2048, 24, dfw(2048), 5632), None),
  "abc-1.3b": (model(2048, 24, abc(2048), 5632), 1376.9),
  "gsa-1.3b": (model(2048, 24, gsa(2048), 5632), 1376.9),
  "deltaproduct-1.3b": (model(2048, 21, deltaproduct(2048, 6, 2), 5632), 1586.2),
  "kda-1.3b": (model(2048, 24, kda(2048), 5632), 1390.9),
  "block-deltanet-1.3b": (model(2048, 24, block_deltanet(2048), 5632), None),
  "s4d-340m": (model(1024, 24, s4d(1024), 2816), None),
  "s4d-1.3b": (model(2048, 24, s4d(2048), 5632), None),
  "hyena-340m": (model(1024, 36, hyena(1024, 1024), 1536), None),
  "hyena-1.3b": (model(2048, 36, hyena(2048, 2048), 2816), None),
  "multihead-hyena-340m": (model(1024, 36, hyena(1024, 64), 1536), None),
  "multihead-hyena-1.3b": (model(2048, 36, hyena(2048, 128), 2816), None),
  "deltanet-3b": (model(2560, 36, deltanet(2560), 6912), None),
  "deltanet-noconv-3b": (model(2560, 36, deltanet(2560, 0), 6912), None),
}


for _size, _d, _millions in (
  ("340m", 1024, (382.4, 369.4, 373.9, 393.0, 404.1)),
  ("1.3b", 2048, (1371.8, 1345.9, 1364.4, 1440.2, 1462.5)),
):
  _inner = {1024: 2816, 2048: 5632}[_d]
  _counts = {
    "mamba2": model(_d, 48, mamba2(_d), 0),
    "mlstm": model(_d, 24, mlstm(_d), {1024: 2752, 2048: 5504}[_d]),
    # Includes the lower bounds of all layers.
    "hgrn2": model(_d, 24, hgrn2(_d), _inner) + 24 * _d,
    "rwkv4": rwkv_model(_d, 24, rwkv4(_d), 4 * _d),
    "rwkv6": rwkv_model(_d, 24, rwkv6(_d), 7 * _d // 2),
  }
  SIZES |= {f"{kind}-{_size}": row for kind, *row in zip(_counts, _counts.values(), _millions)}


def hybrid(d, layers, attention_layers, inner):
  pure = model(d, layers, deltanet(d), inner)
  return pure + attention_layers * (4 * d * d - deltanet(d))


for _size, _d, _layers, _inner in (
  ("340m", 1024, 24, 2816),
  ("1.3b", 2048, 24, 5632),
  ("3b", 2560, 36, 6912),
):
  SIZES[f"deltanet-sliding-{_size}"] = hybrid(_d, _layers, _layers // 2, _inner), None
  SIZES[f"deltanet-global-{_size}"] = hybrid(_d, _layers, 2, _inner), None


def test_hyena_mixer_has_the_published_size():
  # In millions.
  assert (round(hyena(1024, 1024) / 1e6, 3), round(hyena(2048, 2048) / 1e6, 3)) == (4.288, 16.954)


def test_every_preset_has_an_expected_size():
  assert set(SIZES) == {name for name in PRESETS if not name.endswith("-tiny")}


@pytest.mark.parametrize("name", SIZES)
def test_parameter_count(name):
  parameters, millions = SIZES[name]
  assert summarize(preset(name)).parameters == parameters
  if millions is not None:
    assert round(parameters / 1e6, 1) == millions


def test_tied_embeddings_count_once():
  assert summarize(preset("deltanet-340m", tied=True)).parameters == 374_362_112 - V * 1024


# The paper's table 1, last column; state size of one layer with convolutions and normalizers.
EXPANSION = {
  "retnet-340m": (512, 524_288),
  "retnet-1.3b": (512, 1_048_576),
  "mamba-340m": (64, 32_768 + 6_144),
  "mamba-1.3b": (64, 65_536 + 12_288),
  "gla-340m": (128, 131_072),
  "gla-1.3b": (256, 524_288),
  "deltanet-340m": (128, 131_072 + 9_216),
  "deltanet-1.3b": (128, 262_144 + 18_432),
  "linear-attention-340m": (256, 262_144),
  "linear-attention-1.3b": (512, 1_048_576),
  "gated-rfa-340m": (128, 133_120),
  "gated-rfa-1.3b": (128, 266_240),
  "dfw-340m": (64, 65_536),
  "dfw-1.3b": (64, 131_072),
  "abc-340m": (96, 98_304 + 256),
  "abc-1.3b": (96, 196_608 + 256),
  "gsa-340m": (128, 131_072),
  "gsa-1.3b": (128, 262_144),
  "mamba2-340m": (512, 262_144 + 6_912),
  "mamba2-1.3b": (512, 524_288 + 13_056),
  "mlstm-340m": (128, 131_588),
  "mlstm-1.3b": (256, 525_316),
  "hgrn2-340m": (128, 131_072),
  "hgrn2-1.3b": (128, 262_144),
  # RWKV also stores the previous token, for the mixer and for the channel mix.
  "rwkv4-340m": (3, 3_072 + 2_048),
  "rwkv4-1.3b": (3, 6_144 + 4_096),
  "rwkv6-340m": (64, 65_536 + 2_048),
  "rwkv6-1.3b": (64, 131_072 + 4_096),
  "s4d-340m": (64, 65_536),
  "s4d-1.3b": (64, 131_072),
  "gated-deltanet-1.3b": (384, 786_432 + 3 * (2 * 1_536 + 3_072)),
  "deltaproduct-340m": (384, 393_216 + 3 * (3 * 768 + 2 * 1_536)),
  "deltaproduct-1.3b": (384, 786_432 + 3 * (3 * 1_536 + 2 * 3_072)),
  "kda-340m": (128, 131_072 + 9_216),
  "kda-1.3b": (128, 262_144 + 18_432),
  "block-deltanet-340m": (512, 4 * 131_072 + 9_216),
  "block-deltanet-1.3b": (512, 4 * 262_144 + 18_432),
}


@pytest.mark.parametrize("name", EXPANSION)
def test_state_expansion_equals_the_papers(name):
  expansion, per_layer = EXPANSION[name]
  got = summarize(preset(name))
  assert got.state == per_layer * preset(name).depth
  assert got.state_expansion == expansion


def test_attention_has_a_cache_and_no_expansion():
  got = summarize(preset("transformer-1.3b"), length=2048)
  assert got.state == 24 * 8_388_608 and got.state_expansion is None
  windowed = summarize(preset("deltanet-sliding-1.3b"), length=100_000)
  assert windowed.state == 12 * (2 * 2048 * 2048 + 262_144 + 18_432)


def test_hybrid_layer_lists():
  assert preset("deltanet-sliding-1.3b").layers == ("deltanet", "window") * 12
  layers = preset("deltanet-global-1.3b").layers
  # Counted from 1: the second layer and layer N/2 + 1.
  assert [i + 1 for i, name in enumerate(layers) if name == "global"] == [2, 13]
  assert len(layers) == 24


def test_find_repeats():
  a, b, c = "abc"
  assert find_repeats((a,) * 24) == [Repeat((a,), 24)]
  assert find_repeats((a, b) * 12) == [Repeat((a, b), 12)]
  assert find_repeats((a, a, b) * 4) == [Repeat((a, a, b), 4)]
  assert find_repeats((a, b, c)) == [Repeat((a, b, c), 1)]
  layers = preset("deltanet-global-340m").layers
  found = find_repeats(layers)
  # 5 of 24 layers are compiled: a unit of two, one repeated 10 times, one, one repeated 11 times.
  assert [(len(r.unit), r.times) for r in found] == [(2, 1), (1, 10), (1, 1), (1, 11)]
  for repeats in (find_repeats(layers), find_repeats((a, b, a, b, a, c))):
    flat = [name for r in repeats for _ in range(r.times) for name in r.unit]
    assert tuple(flat) in (layers, (a, b, a, b, a, c))


def with_mixer(**changes):
  mixer = DeltaNetConfig()
  for name, value in changes.items():
    setattr(mixer, name, value)  # like a command-line override; not type-checked
  return dict(name="deltanet-tiny", mixers={"deltanet": mixer})


def test_unknown_presets_and_invalid_values_raise():
  for arguments, words in (
    (dict(name="deltanet-9t"), "preset is 'deltanet-9t'"),
    (dict(name="deltanet-tiny", pattern=("gla",)), "pattern names"),
    (dict(name="deltanet-tiny", depth=0), "depth is 0"),
    (dict(name="deltanet-global-tiny", depth=2), "pattern has 4 layers"),
    (with_mixer(implementation="cuda"), "implementation is 'cuda'"),
    (with_mixer(chunk=48), "chunk is 48, expected a power of two"),
    (with_mixer(conv=1), "conv is 1"),
    (with_mixer(activation="gelu"), "activation is 'gelu'"),
  ):
    with pytest.raises(ValueError, match=words):
      preset(**arguments)


def test_preset_changes_mixer_fields_by_name():
  cfg = preset("deltanet-340m", key_size=64, depth=3)
  assert (cfg.mixers["deltanet"].key_size, cfg.depth) == (64, 3)
  assert preset("deltanet-340m").mixers["deltanet"].key_size == 128
  hybrid = preset("deltanet-sliding-tiny", window=8, conv=0)
  assert (hybrid.mixers["window"].window, hybrid.mixers["deltanet"].conv) == (8, 0)
  for name, changes, words in (
    ("deltanet-tiny", dict(key_sizes=3), r"have a field 'key_sizes' \(nearest: key_size"),
    ("transformer-tiny", dict(key_size=3), "neither the model nor its mixers .'attention'. have"),
    ("deltanet-sliding-tiny", dict(heads=2), "heads is a field of the mixers .'deltanet', 'window"),
    ("deltanet-tiny", dict(chunk=48), "chunk is 48"),
    ("deltanett-tiny", {}, r"'deltanett-tiny' \(nearest: deltanet-tiny"),
  ):
    with pytest.raises(ValueError, match=words):
      preset(name, **changes)
