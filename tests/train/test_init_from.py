"""`InitFrom`: a new run starts from given weights and resumes from its own checkpoints."""

import json
import shutil

import jax
import numpy as np
import pytest

from deltanet_jax.data import load_tokenizer, open_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.interop import save_fla
from deltanet_jax.models import build, preset
from deltanet_jax.models.abstract import weights_of
from deltanet_jax.train import InitFrom, PreemptionError, check_start, load_trained, save_weights
from deltanet_jax.train.preemption import Stop
from tests.data.test_tokenizer import hugging_face
from tests.support.training import (
  free_address,
  launch,
  numbers,
  tiny,
  train_on,
  train_words,
  wait_for_exit,
)


@pytest.fixture(scope="module")
def folders(corpus, tmp_path_factory):
  """A run and its two exports, by kind."""
  folder = tmp_path_factory.mktemp("initial")
  train_on(corpus, tiny(), folder / "run", origin=dict(commit="abc"))
  trained = load_trained(folder / "run")
  save_weights(trained, folder / "export")
  save_fla(trained.model, folder / "public")
  return {kind: folder / kind for kind in ("run", "export", "public")}


def initial_of(workdir):
  return json.loads((workdir / "config.json").read_text())["initial"]


def test_run_export_and_public_checkpoint_have_the_same_weights(folders):
  expected = weights_of(load_trained(folders["run"]).model)
  hashes = set()
  for kind, folder in folders.items():
    initial = InitFrom(folder)
    found = initial.origin()
    jax.tree.map(np.testing.assert_array_equal, initial.take(), expected)
    hashes.add(found.pop("sha256"))
    facts = {} if kind == "public" else dict(step=12, commit="abc")
    assert found == dict(path=str(folder), kind=kind) | facts
  assert len(hashes) == 1 and len(hashes.pop()) == 64


def test_starts_from_given_weights_and_resumes_from_its_own(corpus, folders, tmp_path, monkeypatch):
  source = shutil.copytree(folders["public"], tmp_path / "source")
  cfg = tiny()
  cfg.checkpoint.every = 1
  cfg.optimizer.initial_learning_rate = 0.0  # of the first update
  start = lambda name: train_on(corpus, cfg, tmp_path / name, initial=InitFrom(source))
  with monkeypatch.context() as patch, pytest.raises(PreemptionError):
    patch.setattr(Stop, "asked", lambda _, step: step == 1)
    start("run")
  weights = [weights_of(load_trained(x).model) for x in (tmp_path / "run", folders["run"])]
  jax.tree.map(np.testing.assert_array_equal, *weights)
  origin = initial_of(tmp_path / "run")
  assert origin["kind"] == "public" and origin["path"] == str(source)
  start("uninterrupted")
  source.rename(tmp_path / "away")
  with pytest.raises(ValueError, match=r"was started with the weights of .*source, not with .*exp"):
    train_on(corpus, cfg, tmp_path / "run", initial=InitFrom(folders["export"]))
  start("run")  # resumes without loading the initial weights
  assert numbers(tmp_path / "run") == numbers(tmp_path / "uninterrupted")
  # An export stores the origin of the initial weights.
  save_weights(load_trained(tmp_path / "run"), tmp_path / "weights")
  assert load_trained(tmp_path / "weights").history["initial"] == origin
  # Without a checkpoint the initial weights are needed again, unchanged.
  shutil.rmtree(tmp_path / "run/checkpoints")
  with pytest.raises(
    ValueError, match=r"no checkpoint yet, and was started with .*source: name them"
  ):
    train_on(corpus, cfg, tmp_path / "run")
  save_fla(load_trained(folders["run"], 8).model, source)
  with pytest.raises(ValueError, match=r"source no longer holds the weights that .* was started"):
    start("run")
  with pytest.raises(ValueError, match="started with random weights, not with"):
    train_on(corpus, tiny(), folders["run"], initial=InitFrom(folders["export"]))


def changed(**changes):
  cfg = tiny()
  for name, value in changes.items():
    setattr(cfg.model if hasattr(cfg.model, name) else cfg.model.mixers["deltanet"], name, value)
  return cfg


@pytest.mark.parametrize(
  "cfg, difference",
  [
    (changed(vocab=300), r"model\.vocab = 260, the configuration has 300"),
    (changed(logit_cap=30.0), r"model\.logit_cap = None, the configuration has 30\.0"),
    (changed(mlp_multiple=64), r"model\.mlp_inner = 96, the configuration has 128"),
    (changed(conv=0), r"model\.mixers\.deltanet\.conv = 4, the configuration has 0"),
    (changed(activation="elu"), r"model\.mixers\.deltanet\.activation = 'silu', .* has 'elu'"),
    (
      changed(heads=2),
      r"(weight \S+|model\.mixers\.deltanet\.heads) = .*, the configuration has .*",
    ),
    (
      tiny(model=preset("gla-tiny", vocab=260, depth=2, width=32, mlp_multiple=32)),
      r"model\.pattern = \['deltanet', 'deltanet'\], the configuration has \['gla', 'gla'\]",
    ),
  ],
)
def test_weights_of_another_model_raise(folders, tmp_path, cfg, difference):
  for kind in ("run", "public"):
    with pytest.raises(ValueError, match=f"{kind} holds a model with {difference}: use the model"):
      check_start(cfg, tmp_path / "new", initial=InitFrom(folders[kind]))
  assert not (tmp_path / "new").exists()


def test_computation_settings_may_differ(folders, tmp_path):
  cfg = changed(remat="full", scan=False, dtype="bfloat16", chunk=8, init_std=1.0)
  check_start(cfg, tmp_path / "new", initial=InitFrom(folders["run"]))


def test_step_of_the_initial_checkpoint(folders, tmp_path):
  assert InitFrom(folders["run"], 8).origin()["step"] == 8
  with pytest.raises(ValueError, match=r"has no checkpoint of step 3, only of \[8, 12\]"):
    check_start(tiny(), tmp_path / "new", initial=InitFrom(folders["run"], 3))
  with pytest.raises(ValueError, match="is not a run: it has no checkpoints by step"):
    check_start(tiny(), tmp_path / "new", initial=InitFrom(folders["public"], 3))


def losses(workdir):
  return [row["loss"] for row in numbers(workdir) if "loss" in row]


@pytest.mark.slow
def test_the_command_on_two_devices(corpus, folders, tmp_path):
  train_on(corpus, tiny(), tmp_path / "one", initial=InitFrom(folders["public"]))
  words = (f"--init_from={folders['public']}", "--config.mesh.data=1", "--config.mesh.fsdp=2")
  output = wait_for_exit(launch(train_words(corpus, tmp_path / "two", *words), devices=2))
  assert f"starting from the public weights of {folders['public']}" in output
  assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_the_command_in_two_processes(corpus, folders, tmp_path):
  train_on(corpus, tiny(), tmp_path / "one", initial=InitFrom(folders["run"]))
  more = [free_address(), "--processes=2", "--config.mesh.data=1", "--config.mesh.fsdp=2"]
  words = train_words(corpus, tmp_path / "two", *more, f"--init_from={folders['run']}")
  for process in [launch([*words, f"--rank={rank}"]) for rank in range(2)]:
    wait_for_exit(process)
  assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_weights_of_another_tokenizer_raise(folders, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("a b c d e f g h. " * 400)
  (tmp_path / "tokenizer").mkdir()
  file = hugging_face(tmp_path / "tokenizer")
  prepare(text, tmp_path / "corpus", load_tokenizer(file), validation=0.1)
  other = open_corpus(tmp_path / "corpus")
  public = shutil.copytree(folders["public"], tmp_path / "public")
  hugging_face(public, special="<|endoftext|> <|other|>")
  cfg = changed(vocab=310)
  # Another vocabulary size is reported first: weights of the same size are needed.
  weights = tmp_path / "weights"
  save_weights(build(cfg.model), weights, tokenizer="bytes")
  message = r"weights was trained with the tokenizer 'bytes' .* the corpus has 'tokenizer\.json'"
  with pytest.raises(ValueError, match=f"{message}.*--allow_other_tokenizer"):
    train_on(other, cfg, tmp_path / "new", initial=InitFrom(weights))
  assert not (tmp_path / "new").exists()
  for folder in (folders["run"], public):
    with pytest.raises(ValueError, match=r"was trained with the tokenizer"):
      recipe = other.manifest.recipe
      InitFrom(folder).check_tokenizer(recipe.tokenizer, recipe.tokenizer_hash)
  InitFrom(folders["public"]).check_tokenizer("bytes", "any")  # unknown
  InitFrom(weights, allow_other_tokenizer=True).check_tokenizer("tokenizer.json", "any")
