"""Sweeps: which rows are trained, interrupt and resume, and the settings of the paper's scale."""

import dataclasses
import functools
import json
import os
import signal

import jax
import pytest

from deltanet_jax import device_batches
from deltanet_jax.data import StateTracking, mad
from deltanet_jax.eval import Validation
from deltanet_jax.models import preset
from deltanet_jax.train.step import make_trainer
from experiments.configs import mad as mad_table
from experiments.configs import mqar, regbench
from experiments.lib import config_modules, provenance, records, sweep_spec, training
from experiments.lib.records import Records
from experiments.lib.sweep_runner import Sweep
from experiments.lib.sweep_spec import Row
from experiments.lib.training_run import TrainingRun
from tests.support.training import stop_at, tiny

ORIGIN = dict(machine="a machine", commit="abc", date="2026-01-01T00:00:00")


@pytest.fixture(scope="module", autouse=True)
def as_users_run(tmp_path_factory):
  """Default dtypes, because optax fails strict promotion; a shared compilation cache."""
  folder = str(tmp_path_factory.getbasetemp() / "programs")
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
    yield
  jax.config.update("jax_compilation_cache_dir", None)


def make_toy(point, seed):
  cfg = tiny(tokens=4 * 256, eval_every=2, seed=seed)
  cfg.model = preset("transformer-tiny", vocab=2, width=16, depth=1, mlp_ratio=0.0)
  cfg.optimizer.learning_rate = point["learning_rate"]
  cfg.checkpoint.every = 2
  task = StateTracking("parity", length=32, batch=8, seed=seed, validation_batches=1)
  return TrainingRun(cfg, task, [Validation(task)])


GRID = (dict(learning_rate=1e-9), dict(learning_rate=1e-2))
TOY = [
  Row(
    set="toy", key=dict(model=name), make=make_toy, grid=GRID, seeds=seeds,
    metric="validation_loss", lower=True, evaluation="best",
  )
  for name, seeds in (("first", (0, 1)), ("second", (0,)))
]  # fmt: skip


class ExitError(Exception):
  """Raised instead of exiting the process."""


@pytest.fixture
def sweep(tmp_path, monkeypatch):
  """Creates a sweep of the toy rows, like a new start of the command."""

  def leave(code):
    raise ExitError(code)

  monkeypatch.setattr(training, "_exit", leave)
  monkeypatch.setattr(provenance, "code_hash", lambda: "the code")
  return lambda rows=TOY, **options: Sweep(
    "toy", rows, Records(tmp_path / "records.jsonl", ORIGIN), tmp_path / "runs", **options
  )


def recorded(tmp_path):
  return [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_an_interrupted_sweep_resumes(tmp_path, sweep, monkeypatch, capsys):
  assert [sweep().missing(row) for row in TOY] == [3, 2]
  rows = TOY[:1]
  # In the middle of the second run, after two updates.
  with monkeypatch.context() as patch:
    runs = iter([lambda: None, functools.partial(os.kill, os.getpid(), signal.SIGTERM)])
    stop_at(patch, 2, lambda: next(runs, lambda: None)())
    with pytest.raises(ExitError):
      sweep(rows).train()
  assert len(recorded(tmp_path)) == 1 and [sweep().missing(row) for row in TOY] == [2, 2]
  assert sweep(rows).train() == []
  assert "from step 2 of 4" in capsys.readouterr().out
  rows = recorded(tmp_path)
  assert len(rows) == 3 and [sweep().missing(row) for row in TOY] == [0, 2]
  # The other seed has the learning rate with the lower loss.
  first = {x["key"]["learning_rate"]: x["metrics"] for x in rows if x["key"]["seed"] == 0}
  best = min(first, key=lambda rate: first[rate]["evaluation"]["validation_loss"])
  assert {x["key"]["learning_rate"] for x in rows if x["key"]["seed"] == 1} == {best}
  assert best == 1e-2
  # The interrupted run has all evaluations too.
  assert all(len(x["metrics"]["curve"]) == 2 for x in rows)
  metrics = rows[-1]["metrics"]
  assert (metrics["updates"], metrics["of"], len(metrics["curve"])) == (4, 4, 2)
  assert metrics["seconds"] > 0 and "validation_accuracy" in metrics["evaluation"]
  assert not list((tmp_path / "runs").rglob("config.json"))
  # Another commit changes nothing; other settings do, and other code with same_code=True.
  monkeypatch.setattr(provenance, "commit", lambda: "another")
  assert sweep().missing(TOY[0]) == 0
  longer = lambda point, seed: dataclasses.replace(
    make_toy(point, seed), config=dataclasses.replace(make_toy(point, seed).config, tokens=5 * 256)
  )
  assert sweep().missing(dataclasses.replace(TOY[0], make=longer)) == 3
  monkeypatch.setattr(provenance, "code_hash", lambda: "other code")
  assert sweep().missing(TOY[0]) == 0 and sweep(same_code=True).missing(TOY[0]) == 3


def test_a_row_is_trained_by_one_process_at_a_time(sweep, monkeypatch):
  monkeypatch.setattr(Sweep, "_train", lambda self, row: None)
  one, other = sweep(), sweep()
  with one._locked(TOY[0]) as acquired:
    assert acquired and other.train() == ["toy/first"]
  assert other.train() == []


def test_the_grid_search_stops_at_the_first_point_that_is_enough(sweep, monkeypatch):
  grid = tuple(dict(learning_rate=rate) for rate in (1e-3, 2e-3, 3e-3))
  row = dataclasses.replace(
    TOY[0], grid=grid, seeds=(0, 1), metric="validation_accuracy", lower=False, enough=0.99
  )
  reached, trained = {1e-3: 0.5, 2e-3: 0.99, 3e-3: 1.0}, []

  def run(self, row, point, seed):
    trained.append((point["learning_rate"], seed))
    metrics = dict(evaluation=dict(validation_accuracy=reached[point["learning_rate"]]))
    hashes = dict(settings=row.make(point, seed).settings_hash())
    self._records.write(row.run_key(point, seed), metrics, more_provenance=hashes)
    return metrics

  monkeypatch.setattr(Sweep, "_run", run)
  assert sweep([row]).missing(row) == 4
  sweep([row]).train()
  assert trained == [(1e-3, 0), (2e-3, 0), (2e-3, 1)] and sweep([row]).missing(row) == 0


def test_the_best_point_and_evaluation():
  row = TOY[0]
  losses = [dict(validation_loss=x) for x in (2.0, float("nan"), 1.0, 1.0)]
  assert row.best(losses) == 2
  assert dataclasses.replace(row, lower=False).best(losses) == 0
  curve = sweep_spec.subsample(list(range(41)), 20)
  assert curve[-1] == 40 and len(curve) <= 20


def test_a_misspelled_metric_is_rejected_before_training(sweep, monkeypatch):
  monkeypatch.setattr(Sweep, "_train", lambda self, row: pytest.fail("training started"))
  wrong = dataclasses.replace(TOY[1], metric="validation_los")
  message = (
    r"row toy/second has the metric 'validation_los' \(nearest: validation_loss.*\), but its"
    " evaluators report only validation_loss, validation_accuracy: correct the row"
  )
  with pytest.raises(ValueError, match=message):
    sweep([TOY[0], wrong]).train()


@pytest.mark.parametrize("name", ["mqar", "mad", "regbench"])
def test_evaluators_report_the_metric_of_every_row(name):
  rows = {(row.set, row.metric): row for row in sweep_spec.load(name).rows}
  for row in rows.values():
    names = row.make(row.grid[0], row.seeds[0]).metric_names()
    assert row.metric in names


def test_metrics_of_an_evaluator_that_needs_a_model_are_unknown():
  made = make_toy(GRID[0], 0)
  needs_model = lambda context: [("layers", float(context.model.depth))]
  assert dataclasses.replace(made, evaluators=[needs_model]).metric_names() is None


def test_rows_are_selected_by_set_and_pattern():
  rows = sweep_spec.load("mqar").rows
  assert {row.set for row in sweep_spec.select(rows, ["small"])} == {"small"}
  chosen = sweep_spec.select(rows, ["paper/deltanet-*"])
  assert [row.name for row in chosen if "conv" not in row.name] == [
    f"paper/deltanet-{width}-64" for width in (64, 128, 256, 512)
  ]
  with pytest.raises(
    ValueError, match=r"--rows=paper/deltanet-65-64 matches no row \(nearest: .*64-64"
  ):
    sweep_spec.select(rows, ["paper/deltanet-65-64"])


def test_config_is_a_name_or_a_path(tmp_path):
  path = str(config_modules.FOLDER / "mqar.py")
  assert sweep_spec.load(path) == sweep_spec.load("mqar")
  own = tmp_path / "own.py"
  own.write_text("from experiments.configs.mqar import ROWS")
  assert sweep_spec.load(str(own)).name == "own"
  assert sweep_spec.load(str(own)).rows == sweep_spec.load("mqar").rows


@pytest.mark.parametrize(
  "value, content, message",
  [
    ("mqr", None, r"there is no config 'mqr' \(nearest: mqar\)"),
    ("nowhere.py", None, "there is no such file"),
    ("demo", None, "defines no ROWS; sweeps in experiments/configs: language_modeling, mad, mqar"),
    ("mqar.py", "ROWS = []", "has the name of a file in experiments/configs"),
    (
      "own.py",
      "from experiments.configs import mqar\nROWS = mqar.ROWS[:1] * 2",
      "several rows named 'paper/deltanet-64-64'",
    ),
  ],
)
def test_wrong_sweep_configs(value, content, message, tmp_path):
  if content:
    (tmp_path / value).write_text(content)
    value = str(tmp_path / value)
  with pytest.raises(ValueError, match=message):
    sweep_spec.load(value)


def full(table, name, point=None):
  (row,) = sweep_spec.select(table.ROWS, [name])
  return row.make(point or row.grid[0], row.seeds[0])


def test_full_scale_of_mqar():
  for d in (64, 512):
    made = full(mqar, f"paper/deltanet-{d}-64")
    cfg = made.config
    assert (cfg.steps, made.task.epoch, cfg.optimizer.rate_every) == (64 * 782, 782, 782)
    assert cfg.data.scored == 64 and cfg.optimizer.clip is None and cfg.optimizer.decay_all
    layer = 4 * d * d + 2 * d + d // 2 + 2 * 2 * d  # projections, beta, per-head norm, LayerNorms
    assert made.parameters() == 8192 * d + 4 * layer + 2 * d
  attention = full(mqar, "paper/attention-64-64")
  assert attention.parameters() == 8192 * 64 + 512 * 64 + 2 * (4 * 64 * 65 + 256) + 128
  (row,) = sweep_spec.select(mqar.ROWS, ["paper/mamba-conv-64-64"])
  assert [round(x["learning_rate"], 6) for x in row.grid] == [1e-4, 0.000464, 0.002154, 0.01]
  assert set(mqar.PAPER) <= {row.key["model"] for row in mqar.ROWS}


def test_full_scale_of_mad():
  paper = sweep_spec.select(mad_table.ROWS, ["paper"])
  assert set(mad_table.PAPER) <= {row.key["model"] for row in paper}
  mine = [row for row in paper if row.key["model"] == "deltanet-conv"]
  assert (len(mine), sum(row.runs for row in mine)) == (66, 396)
  made = full(mad_table, "paper/deltanet-conv-context_recall-16-128-12800")
  assert made.config.steps == 200 * 100 and made.config.data.length == 127
  d, inner = 128, 352
  layer = 4 * d * d + 8 * d + 12 * d + 16 + 3 * d * inner + 2 * d
  assert made.parameters() == 2 * 16 * d + 16 + 2 * layer + d
  memorize = full(mad_table, "paper/gla-memorize-8192-32-256")
  assert memorize.config.steps == 400 and memorize.config.data.scored == 16
  compress = full(mad_table, "paper/deltanet-conv-compress-16-32-12800")
  assert compress.parameters() == made.parameters() + 2 * (d * d + 2 * d)
  assert sum(map(len, mad.SETTINGS.values())) == 66


def test_full_scale_of_regbench():
  made = full(regbench, "paper/deltanet-conv-20000", dict(width=256, depth=4, gate=1))
  cfg = made.config
  assert cfg.steps == 200 * 625 and cfg.data.length == 948 and cfg.model.vocab == 20
  assert cfg.optimizer.warmup_tokens == cfg.tokens // 10
  mixer = cfg.model.mixers["deltanet-conv"]
  assert (mixer.heads, mixer.key_size, mixer.value_size) == (4, 32, 64)
  assert set(regbench.PAPER) <= {row.key["model"] for row in regbench.ROWS}
  (row,) = sweep_spec.select(regbench.ROWS, ["paper/deltanet-2500"])
  assert row.runs == 18


@pytest.mark.parametrize("name", ["mqar", "mad", "regbench"])
def test_every_model_of_a_table_can_be_built(name):
  """Full-scale models, abstractly; the first row of each model."""
  seen = set()
  for row in sweep_spec.load(name).rows:
    if row.key["model"] not in seen:
      seen.add(row.key["model"])
      made = row.make(row.grid[0], row.seeds[0])
      made.config.validate()
      assert made.task.shape == (made.config.data.batch, made.config.data.length)
      assert made.parameters() > 0
  assert len(seen) >= 9


@pytest.mark.parametrize(
  "name,pattern",
  [
    ("mqar", "small/attention-32-4"),
    ("mad", "small/attention-compress"),
    ("regbench", "small/attention-500"),
  ],
)
@pytest.mark.slow
def test_one_update_of_each_benchmark_model(name, pattern):
  (row,) = sweep_spec.select(sweep_spec.load(name).rows, [pattern])
  made = row.make(row.grid[0], 0)
  trainer = make_trainer(made.config)
  batch = device_batches.to_devices(
    made.task.batch(0, 0, 1), trainer.batch_shapes(), made.config.data.scored
  )
  state, metrics = jax.jit(
    lambda batch: trainer.update(trainer.init(0), batch, jax.numpy.float32(1e-3))
  )(batch)
  assert 0 < metrics["loss"] < 10 and metrics["skipped"] == 0 and state["step"] == 1


def test_records_are_found_by_provenance(tmp_path):
  out = Records(tmp_path / "records.jsonl", ORIGIN)
  out.write(dict(a=1), dict(x=2), more_provenance=dict(code="c", settings="s"))
  assert out.find(dict(a=1), dict(code="c"))["metrics"] == dict(x=2)
  assert out.find(dict(a=1), dict(code="d")) is None and out.find(dict(a=2), {}) is None
  again = records.Records(tmp_path / "records.jsonl", ORIGIN, again=True)
  assert again.find(dict(a=1), {}) is None
  again.write(dict(a=1), dict(x=3))
  assert again.find(dict(a=1), {})["metrics"] == dict(x=3)
