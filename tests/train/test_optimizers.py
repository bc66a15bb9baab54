"""Every optimizer and schedule trains, resumes bitwise identically, and is checked on resume."""

import json
import os
import signal

import jax
import numpy as np
import optax
import pytest

from deltanet_jax.data import CorpusTask
from deltanet_jax.models import preset
from deltanet_jax.models.abstract import abstract_model
from deltanet_jax.train import PreemptionError, check_start
from deltanet_jax.train.checkpoint import Checkpoints
from deltanet_jax.train.optim import is_matrix, learning_rate
from deltanet_jax.train.step import make_trainer
from tests.support.training import launch, numbers, silent, stop_at, tiny, wait_for_exit

RATES = dict(adamw=1e-2, muon=1e-2, lion=2e-3, adafactor=1e-1)


def config(name="adamw", **changes):
  cfg = tiny(tokens=8 * 256, eval_every=100)
  cfg.model.depth, cfg.checkpoint.every = 1, 100
  cfg.optimizer.name, cfg.optimizer.learning_rate = name, RATES[name]
  cfg.optimizer.warmup_tokens = 0
  for field, value in changes.items():
    setattr(cfg.optimizer, field, value)
  return cfg


def own():
  """A chain with a schedule, two groups of weights, and state of other dtypes and shapes."""
  rate = optax.linear_schedule(1e-2, 1e-3, 8)
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.partition(
      {"a": optax.adamw(rate, mu_dtype="bfloat16"), "b": optax.sgd(1e-2, momentum=0.9)},
      lambda weights: {name: "ab"[name == "embedding"] for name in weights},
    ),
    optax.contrib.reduce_on_plateau(patience=2),
  )


def run(corpus, cfg, workdir, **options):
  task = CorpusTask(corpus, length=cfg.data.length, batch=cfg.data.batch)
  return silent(cfg, workdir, task, **options)


def final_state(workdir, cfg, optimizer=None):
  shapes = make_trainer(cfg, optimizer=optimizer).state_shapes()
  return Checkpoints(workdir, cfg.checkpoint).restore(shapes)[0]


# AdamW: test_loop.py.
@pytest.mark.parametrize("name", ["muon", "lion", "adafactor", "own"])
def test_loss_decreases_and_resume_is_bitwise_identical(corpus, tmp_path, monkeypatch, name):
  cfg = config("adamw" if name == "own" else name)
  options = lambda: dict(optimizer=own()) if name == "own" else {}
  run(corpus, cfg, tmp_path / "a", **options())
  losses = [row["loss"] for row in numbers(tmp_path / "a")]
  assert len(losses) == 8 and losses[-1] < losses[0] - 0.5, losses
  with monkeypatch.context() as patch:
    stop_at(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(PreemptionError, match="after step 5"):
      run(corpus, cfg, tmp_path / "b", **options())
  run(corpus, cfg, tmp_path / "b", **options())
  assert numbers(tmp_path / "b") == numbers(tmp_path / "a")
  states = [final_state(tmp_path / folder, cfg, **options()) for folder in "ab"]
  jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.fixture(scope="module")
def started(corpus, tmp_path_factory):
  """Workdirs of a run of one update with AdamW, and of one with an optax chain."""
  folder = tmp_path_factory.mktemp("started")
  cfg = config()
  cfg.tokens = 256
  run(corpus, cfg, folder / "adamw")
  run(corpus, cfg, folder / "own", optimizer=optax.adamw(1e-3))
  return folder, cfg


def test_another_optimizer_does_not_resume(started):
  folder, cfg = started
  other = config("muon")
  other.tokens, other.optimizer.learning_rate = cfg.tokens, cfg.optimizer.learning_rate
  for start, workdir, options, message in (
    (other, "adamw", {}, r"optimizer\.name = 'adamw', now it is 'muon': use the same"),
    (cfg, "adamw", dict(optimizer=optax.sgd(0.1)), "now optimizer= is another optimizer"),
    (cfg, "own", {}, "an optimizer of its own, now it is not given: pass the same"),
    (cfg, "own", dict(optimizer=optax.sgd(0.1)), r"whose state.*count is int32\[\], now it is abs"),
  ):
    with pytest.raises(ValueError, match=message):
      check_start(start, folder / workdir, **options)
  check_start(cfg, folder / "own", optimizer=optax.adamw(1e-4))


def test_a_config_without_the_new_fields_is_that_of_adamw(started, tmp_path):
  folder, cfg = started
  values = json.loads((folder / "adamw/config.json").read_text())
  for name in ("name", "schedule", "decay_fraction", "momentum"):
    del values["config"]["optimizer"][name]
  del values["own_optimizer"]
  (tmp_path / "config.json").write_text(json.dumps(values))
  check_start(cfg, tmp_path)
  with pytest.raises(ValueError, match="schedule = 'cosine', now it is 'wsd'"):
    other = config(schedule="wsd")
    other.tokens = cfg.tokens
    check_start(other, tmp_path)


def test_muon_updates_projections_only():
  cfg = preset("deltanet-tiny", vocab=260, depth=2, positions=32)
  model = abstract_model(cfg)
  mine = {name.split(".", 4)[-1] for name in model.shapes if is_matrix(model, name)}
  mlp, qkv = ("mlp.up", "mlp.gate", "mlp.down"), ("qkv.q", "qkv.k", "qkv.v")
  mixer = (f"mixer.{part}" for part in (*qkv, "beta", "output.out"))
  assert mine == {f"0.{part}.kernel" for part in (*mlp, *mixer)}


def test_muon_orthogonalizes_each_layer():
  cfg = config("muon", weight_decay=0.0, clip=None)
  cfg.model.depth = 2
  trainer = make_trainer(cfg)
  rng = np.random.default_rng(0)
  random = lambda x: rng.normal(size=x.shape).astype(np.float32)
  weights = {name: random(x) for name, x in trainer.abstract_model.shapes.items()}
  grads = {name: random(x) for name, x in weights.items()}
  found, _ = trainer.optimizer.update(grads, trainer.optimizer.init(weights), weights)
  name = next(name for name in weights if name.endswith("mlp.up.kernel"))
  assert found[name].shape[0] == 2
  for layer in np.asarray(found[name]):
    singular = np.linalg.svd(layer, compute_uv=False) / (0.2 * np.sqrt(max(layer.shape)))
    assert singular.min() > 0.5 and singular.max() < 1.5
  np.testing.assert_allclose(np.abs(found["embedding"]), 1, rtol=1e-3)  # Adam's first step


def test_schedules():
  cfg = config(schedule="wsd", decay_fraction=0.25, warmup_tokens=2 * 256, final_learning_rate=0.0)
  cfg.optimizer.initial_learning_rate = 0.0
  rates = [float(learning_rate(cfg, step)) / 1e-2 for step in range(9)]
  np.testing.assert_allclose(rates, [0, 0.5, 1, 1, 1, 1, 1, 0.5, 0], atol=1e-6)
  cfg.optimizer.schedule = "constant"
  rates = [float(learning_rate(cfg, step)) / 1e-2 for step in range(9)]
  np.testing.assert_allclose(rates, [0, 0.5, *[1] * 7], atol=1e-6)
  cfg.optimizer.schedule = "linear"
  with pytest.raises(ValueError, match=r"optimizer\.schedule is 'linear', expected one of"):
    cfg.validate()


@pytest.mark.slow
def test_fsdp_of_eight_devices_matches_one():
  output = wait_for_exit(launch(["-m", "tests.support.optimizer_mesh_worker"], devices=8))
  rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
  assert [row["name"] for row in rows] == [*RATES, "own"]
  for row in rows:
    assert row["error"] < 1e-4, row
    # Moments are sharded; Adafactor's factored ones, counts and per-head norms are replicated.
    assert row["share"] < (1.5 if row["name"] != "adafactor" else 8), row
