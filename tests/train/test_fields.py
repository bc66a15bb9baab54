"""Every field of a configuration is read by something that runs."""

import dataclasses
import sys

import pytest

from deltanet_jax import config
from deltanet_jax.config import (
  AttentionConfig,
  CheckpointConfig,
  DataConfig,
  DeltaNetConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from deltanet_jax.train.loop import train
from tests.train.conftest import tiny

CLASSES = (
  AttentionConfig,
  CheckpointConfig,
  DataConfig,
  DeltaNetConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
# Looking at a field to check, show or copy it is not reading it.
PASSIVE = {"validate", "_check_positive", "_check_delta_rule", "__repr__", "__eq__", "__hash__"}
PASSIVE |= {"to_json", "from_json", "_asdict_inner", "asdict", "replace", "_replace"}


@pytest.fixture
def reads(monkeypatch):
  seen = set()

  def recording(cls):
    def read(self, name):
      if sys._getframe(1).f_code.co_name not in PASSIVE:
        seen.add((cls.__name__, name))
      return object.__getattribute__(self, name)

    return read

  for cls in CLASSES:
    monkeypatch.setattr(cls, "__getattribute__", recording(cls))
  return seen


def test_no_field_is_idle(corpus, tmp_path, reads):
  cfg = tiny(tokens=2 * 256)
  cfg.model.mixers["window"] = AttentionConfig(head_size=16, window=8)
  cfg.model.pattern = ("deltanet", "window")
  cfg.data.corpus = str(corpus.train.folder)
  train(cfg, tmp_path / "run", lambda: corpus, say=lambda _: None)
  fields = {(cls.__name__, field.name) for cls in CLASSES for field in dataclasses.fields(cls)}
  # The name of the corpus is for whoever opens it: experiments.train.
  assert fields - reads <= {("DataConfig", "corpus")}
  assert config.from_json(config.to_json(cfg)) == cfg
