"""Every field of a configuration is read by something that runs."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import pytest

from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  from_json,
  to_json,
)
from deltanet_jax.mixers import MIXERS, mixer_config
from deltanet_jax.models import build
from tests.support.training import tiny, train_on

CLASSES = (
  CheckpointConfig,
  DataConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  *map(mixer_config, MIXERS),
)
# Looking at a field to check, show or copy it is not reading it.
PASSIVE = {"validate", "check_positive", "__repr__", "__eq__", "__hash__"}
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
  small = dict(deltanet=dict(key_size=16, value_size=16), attention=dict(head_size=16, window=8))
  small |= dict(gated_deltanet=dict(heads=1, key_size=16, value_size=16))
  small |= dict(deltaproduct=small["gated_deltanet"], kda=small["deltanet"])
  small |= dict(block_deltanet=dict(key_size=16, block_size=8, value_size=16))
  small |= dict(mamba2=dict(head_size=16), hgrn2=dict(key_size=16), rwkv6=dict(head_size=16))
  small |= dict(rwkv7=dict(head_size=16))
  cfg.model.mixers = {kind: mixer_config(kind)(**small.get(kind, {})) for kind in MIXERS}
  cfg.model.pattern, cfg.model.depth = tuple(MIXERS), len(MIXERS)
  # A mixer reads its fields while it is traced; to compile all of them would take minutes.
  tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
  jax.eval_shape(lambda tokens: build(cfg.model)(tokens), tokens)
  trained = tiny(tokens=2 * 256)
  trained.data.corpus = str(corpus.train.folder)
  trained.stop_metric, trained.stop_above = "validation_accuracy", 2.0
  train_on(corpus, trained, tmp_path / "run")
  fields = {(cls.__name__, field.name) for cls in CLASSES for field in dataclasses.fields(cls)}
  # The name of the corpus is for whoever opens it: experiments.train.
  assert fields - reads <= {("DataConfig", "corpus")}
  assert from_json(to_json(cfg), mixer_config) == cfg
