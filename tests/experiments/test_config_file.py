"""Errors in configs are one sentence; `--help` lists all fields."""

import dataclasses

import pytest

from deltanet_jax.config import OptimizerConfig, TrainConfig, help_of
from deltanet_jax.mixers import MIXERS, mixer_config
from deltanet_jax.models.presets import FAMILIES
from experiments.configs import tiny
from experiments.lib import config_file, config_help, provenance

CONFIGS = provenance.CHECKOUT / "experiments/configs"


@pytest.mark.parametrize(
  "content, message",
  [
    ("x = 1\ndef get_config(:", r"config\.py, line 2: invalid syntax"),
    ("x = 1\nimport nowhere", r"config\.py, line 2: ModuleNotFoundError: No module .*'nowhere'"),
    (
      "from deltanet_jax.config import Nothing",
      "line 1: ImportError: cannot import name",
    ),
    ("x = 1", r"has no function get_config\(\)"),
    ("def get_config(): return", "returned NoneType, expected TrainConfig"),
    ("def get_config(name): return", "needs a name after the colon"),
    ("def get_config():\n  return 1 / 0", "line 2: ZeroDivisionError: division by zero"),
  ],
)
def test_errors_name_file_and_line(content, message, tmp_path):
  (tmp_path / "config.py").write_text(content)
  with pytest.raises(ValueError, match=message):
    config_file.load(str(tmp_path / "config.py"))


@pytest.mark.parametrize(
  "value, message",
  [
    ("nowhere.py", "there is no such file: 'nowhere.py'"),
    (f"{CONFIGS}/lm.py:deltanett-340m", r"lm\.py:deltanett-340m: .*\(nearest: deltanet-340m"),
    (f"{CONFIGS}/lm.py:deltanet", "'deltanet' has no such size"),
    (f"{CONFIGS}/demo.py:gla", "the demo has no model 'gla'"),
    (f"{CONFIGS}/tiny.py:gated_deltanet", r"\(nearest: gated-deltanet"),
  ],
)
def test_unknown_config_names(value, message):
  with pytest.raises(ValueError, match=message):
    config_file.load(value)


def test_a_name_stands_for_a_file_in_configs():
  assert config_file.resolve("lm:deltanet-340m") == f"{CONFIGS}/lm.py:deltanet-340m"
  assert config_file.load("demo:transformer") == config_file.load(f"{CONFIGS}/demo.py:transformer")
  with pytest.raises(ValueError, match=r"there is no config 'dem' \(nearest: demo\)"):
    config_file.load("dem")
  with pytest.raises(ValueError, match="it is a sweep, see `python -m"):
    config_file.load("mqar")


@pytest.mark.parametrize(
  "word, message",
  [
    (
      "--config.optimizer.learning_rat=1",
      r"learning_rat \(nearest: optimizer\.learning_rate",
    ),
    ("--config.learning_rate=1", r"no field learning_rate \(nearest: optimizer\.learning_rate"),
    ("--noconfig.model.tide", r"model\.tide \(nearest: model\.tied"),
    ("--config.model.mixers.deltanet.key_sise=1", r"nearest: model\.mixers\.deltanet\.key_size"),
    ("--config.xyzzy=1", "no field xyzzy; --help lists them"),
  ],
)
def test_unknown_fields_name_the_nearest(word, message):
  with pytest.raises(ValueError, match=message):
    config_file._check_fields(config_file.load(f"{CONFIGS}/demo.py"), ["train", word])


def test_known_fields_pass():
  words = ["--config.model.mixers.deltanet.key_size=3", "--noconfig.model.tied", "--workdir=x"]
  config_file._check_fields(config_file.load(f"{CONFIGS}/demo.py"), words)


def test_help_lists_every_field_with_its_default_and_help_text():
  shown = config_help.text()
  for name, cls in (("", TrainConfig), ("optimizer.", OptimizerConfig)):
    for field in dataclasses.fields(cls):
      assert f"--config.{name}{field.name}" in shown
      assert dataclasses.is_dataclass(field.type) or f"  {help_of(field)}\n" in shown
  for kind in MIXERS:
    section = shown.split(f"of the mixer {kind},")[1].split("of the mixer")[0]
    for field in dataclasses.fields(mixer_config(kind)):
      assert f"--config.model.mixers.NAME.{field.name}" in section
  assert "--config.optimizer.learning_rate=0.0003       Peak learning rate, reached" in shown


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_tiny_run(family):
  cfg = tiny.get_config(family)
  cfg.validate()
  assert cfg.model.vocab == 258 and cfg.steps < 250
