"""Logical axes and weight-decay flags of abstract models."""

from deltanet_jax.models import preset
from deltanet_jax.models.abstract import abstract_model
from deltanet_jax.sharding import RULES


def test_every_weight_has_logical_axes():
  known = {*RULES, None}
  for name in (
    "deltanet-sliding-tiny",
    "gla-conv-tiny",
    "mamba-tiny",
    "gated-deltanet-tiny",
    "s4d-tiny",
    "hyena-tiny",
  ):
    model = abstract_model(preset(name))
    assert model.axes.keys() == model.shapes.keys() == model.decays.keys()
    for weight, names in model.axes.items():
      assert len(names) == len(model.shapes[weight].shape) and set(names) <= known, weight
      assert (names[0] == "layers") == weight.startswith("stacks."), weight


def test_norms_biases_and_decay_rates_have_no_weight_decay():
  decays = {}
  for name in ("deltanet-tiny", "gated-deltanet-tiny", "mamba-tiny", "gla-tiny"):
    decays |= abstract_model(preset(name)).decays
  last = lambda wanted: {name.rsplit(".", 1)[-1] for name, yes in decays.items() if yes == wanted}
  assert last(False) == {"scale", "bias", "A_log", "dt_bias", "D"}
  assert last(True) == {"kernel", "embedding", "dt_kernel"}


def test_state_spaces_and_filters_have_no_weight_decay():
  fixed = lambda name: {
    weight.split(".mixer.")[1]
    for weight, yes in abstract_model(preset(name)).decays.items()
    if ".mixer." in weight and not yes
  }
  assert fixed("s4d-tiny") == {"log_dt", "A_log", "A_imag", "D", "out.bias"}
  network = {f"filter.{part}.{i}" for part in ("kernels", "biases") for i in range(3)}
  network |= {"filter.frequency", "filter.last"}
  assert fixed("hyena-tiny") == network | {"into.bias", "conv.bias", "bias", "out.bias"}
