"""Train a model from a config: open its task, train, evaluate, and record the result."""

import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence

import jax

from deltanet_jax.config import TrainConfig
from deltanet_jax.data import CorpusTask, Task, load_tokenizer, open_corpus, shipped_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.eval import Validation
from deltanet_jax.files import writing
from deltanet_jax.train import (
  DivergenceError,
  Evaluator,
  InitFrom,
  PreemptionError,
  check_start,
  saved_steps,
  train,
)
from experiments.lib import extensions, provenance
from experiments.lib.exit_codes import INTERRUPTED, PREEMPTED
from experiments.lib.multihost import report, wait_for_all
from experiments.lib.records import Records
from experiments.lib.training_run import TrainingRun


def open_task(
  cfg: TrainConfig,
  workdir: pathlib.Path,
  name: str | None = None,
  *,
  initial: InitFrom | None = None,
  **options,
) -> Task:
  """Open a task by name, or the corpus of a config; without either, prepare the bundled novels.

  Validates config, mesh, workdir and initial weights first, so that nothing is written if one of
  them is wrong.

  Args:
    name: see `extensions.open_task`; None: a corpus.
    initial: initial weights of a new run.
    options: passed to `check_start`.
  """
  check_start(cfg, workdir, initial=initial, **options)
  if name is not None:
    return extensions.open_task(name, cfg)
  folder = cfg.data.corpus
  if not folder:
    folder, tokenizer = workdir / "corpus", load_tokenizer("bytes")
    if initial is not None and not saved_steps(workdir):
      initial.check_tokenizer(tokenizer.name, tokenizer.hash)
    if jax.process_index() == 0:
      with writing(workdir):
        prepare(shipped_corpus(), folder, tokenizer, validation=0.1)
    wait_for_all("corpus")
  corpus = open_corpus(folder)
  return CorpusTask(corpus, length=cfg.data.length, batch=cfg.data.batch, seed=cfg.seed)


def run(
  cfg: TrainConfig,
  workdir: pathlib.Path,
  task: Task,
  evaluators: Sequence[Evaluator] | None = None,
  *,
  origin: dict | None = None,
  **options,
) -> dict[str, float]:
  """Train, and return the last evaluation; exit the process on SIGTERM or Ctrl-C.

  Args:
    evaluators: the validation split of the task if None.
    origin: stored in config.json with the provenance.
    options: passed to `train`.
  """
  if evaluators is None:
    evaluators = [Validation(task, cfg.eval_batches)]
  try:
    return train(
      cfg,
      workdir,
      task,
      evaluators=evaluators,
      origin=provenance.describe() | (origin or {}),
      report=report,
      **options,
    )
  except PreemptionError as e:
    report(str(e))
    _exit(PREEMPTED)
  except KeyboardInterrupt as e:
    report(str(e) or "interrupted")
    _exit(INTERRUPTED)


def temporary_workdir(folder: pathlib.Path, name: str, run: TrainingRun) -> pathlib.Path:
  """Workdir of a run until it is recorded.

  Hashes of code and settings are in its name: only the same code with the same settings resumes.
  """
  return folder / f"{name}-{provenance.code_hash()}-{run.settings_hash()}"


def train_and_record(
  training_run: TrainingRun,
  workdir: pathlib.Path,
  key: dict,
  metrics: Callable[[dict[str, float]], dict],
  *,
  records: Records | None,
  diverged: dict | None = None,
  keep_workdir: bool = False,
) -> dict:
  """Train in `workdir`, resuming if it has a checkpoint; write a record, then delete `workdir`.

  Args:
    key: of the record.
    metrics: computes the metrics to record from the last evaluation. `seconds` is added: the time
      of training, None if the run was resumed, because earlier starts are not timed.
    records: file to write to; None writes no record.
    diverged: metrics to record if training diverges; None raises DivergenceError.
    keep_workdir: do not delete `workdir`.

  Returns:
    The metrics.
  """
  resumed, start = bool(saved_steps(workdir)), time.perf_counter()
  try:
    last = run(training_run.config, workdir, training_run.task, training_run.evaluators)
    found = metrics(last)
  except DivergenceError as e:
    if diverged is None:
      raise
    report(str(e))
    found = dict(diverged)
  found["seconds"] = None if resumed else round(time.perf_counter() - start, 1)
  if records is not None:
    hashes = dict(code=provenance.code_hash(), settings=training_run.settings_hash())
    records.write(key, found, more_provenance=hashes)
  if not keep_workdir:
    shutil.rmtree(workdir, ignore_errors=True)
  return found


def _exit(code: int):
  if jax.process_count() == 1:
    # Checkpoints are saved and closed: do not wait for a compilation that may still be running.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)
