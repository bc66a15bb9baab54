"""Every configuration field has a help text, which `--help` and the documentation show."""

import dataclasses

import pytest

from deltanet_jax.config import ModelConfig, TrainConfig, help_of
from deltanet_jax.mixers import MIXERS, mixer_config

# A field of TrainConfig that is itself a config class is a section: its own fields have the help.
SECTIONS = [x.type for x in dataclasses.fields(TrainConfig) if dataclasses.is_dataclass(x.type)]
CONFIGS = (TrainConfig, *SECTIONS, *map(mixer_config, MIXERS))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_field_has_a_help_text(config):
  assert ModelConfig in CONFIGS
  for field in dataclasses.fields(config):
    text = help_of(field)
    assert field.type in SECTIONS or text.endswith("."), f"{config.__name__}.{field.name}: {text!r}"
