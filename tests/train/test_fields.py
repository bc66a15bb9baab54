"""Every config field is read somewhere in the library, and configs survive JSON."""

import ast
import dataclasses
import inspect
import pathlib

import pytest

import deltanet_jax
from deltanet_jax.config import (
  CheckpointConfig,
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
  from_json,
  to_json,
)
from deltanet_jax.mixers import MIXERS, mixer_config
from tests.support.training import tiny

ROOT = pathlib.Path(deltanet_jax.__file__).parent
# Reading a field only to validate it does not count.
PASSIVE = ("validate", "check_positive")
# Read by `experiments.lib.training`, which opens the corpus and its validation.
ELSEWHERE = {("DataConfig", "corpus"), ("TrainConfig", "eval_batches")}


def attributes_read(path: pathlib.Path) -> set[str]:
  """Names of all attributes read in a file, outside of validation."""
  names = set()

  def visit(node):
    if isinstance(node, ast.FunctionDef) and node.name in PASSIVE:
      return
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
      names.add(node.attr)
    for child in ast.iter_child_nodes(node):
      visit(child)

  visit(ast.parse(path.read_text()))
  return names


# `MeshConfig` is read as a dictionary, by `sizes`.
@pytest.mark.parametrize(
  "cls", [CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, TrainConfig]
)
def test_every_field_is_read(cls):
  read = set().union(*map(attributes_read, ROOT.rglob("*.py")))
  idle = {(cls.__name__, field.name) for field in dataclasses.fields(cls) if field.name not in read}
  assert idle <= ELSEWHERE


@pytest.mark.parametrize("kind", MIXERS)
def test_every_mixer_field_is_read(kind):
  cls = mixer_config(kind)
  # In the mixer's own module, or in those that mixers share.
  modules = {pathlib.Path(inspect.getfile(base)) for base in cls.__mro__[:-1]}
  modules |= {ROOT / "mixers" / name for name in ("base.py", "layers.py", "matrix_state.py")}
  read = set().union(*map(attributes_read, modules))
  assert {field.name for field in dataclasses.fields(cls)} <= read


def test_a_config_with_all_mixers_survives_json():
  cfg = tiny()
  cfg.model.mixers = {kind: mixer_config(kind)() for kind in MIXERS}
  cfg.model.pattern, cfg.model.depth = tuple(MIXERS), len(MIXERS)
  assert from_json(to_json(cfg), mixer_config) == cfg
