"""From a configuration to a trained model: its task opened, trained and validated."""

import os
import pathlib
import sys
from collections.abc import Sequence

import jax

from deltanet_jax.config import TrainConfig
from deltanet_jax.data import CorpusTask, Task, load_tokenizer, open_corpus, shipped_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.eval import Validation
from deltanet_jax.files import writing
from deltanet_jax.train import Evaluator, PreemptionError, check_start, train
from experiments.lib import provenance
from experiments.lib.exit_codes import INTERRUPTED, PREEMPTED
from experiments.lib.multihost import report, wait_for_all


def open_task(cfg: TrainConfig, workdir: pathlib.Path, **options) -> CorpusTask:
  """The corpus of the configuration; the shipped novels are prepared into the workdir first.

  Only after the configuration, the mesh, the folder and the initial weights were found right.

  Args:
    options: of `check_start`.
  """
  check_start(cfg, workdir, **options)
  folder = cfg.data.corpus
  if not folder:
    folder = workdir / "corpus"
    if jax.process_index() == 0:
      with writing(workdir):
        prepare(shipped_corpus(), folder, load_tokenizer("bytes"), validation=0.1)
    wait_for_all("corpus")
  corpus = open_corpus(folder)
  return CorpusTask(corpus, length=cfg.data.length, batch=cfg.data.batch, seed=cfg.seed)


def run(
  cfg: TrainConfig,
  workdir: pathlib.Path,
  task: Task,
  evaluators: Sequence[Evaluator] | None = None,
  **options,
) -> dict[str, float]:
  """Trains, and returns the last evaluation; exits with its code if told to stop.

  Args:
    evaluators: validation on what the task holds out if None.
    options: of `train`.
  """
  if evaluators is None:
    evaluators = [Validation(task, cfg.eval_batches)]
  try:
    return train(
      cfg,
      workdir,
      task,
      evaluators=evaluators,
      origin=provenance.describe(),
      report=report,
      **options,
    )
  except PreemptionError as e:
    report(str(e))
    _leave(PREEMPTED)
  except KeyboardInterrupt as e:
    report(str(e) or "stopped at once")
    _leave(INTERRUPTED)


def _leave(code):
  if jax.process_count() == 1:
    # All is saved and closed. Without waiting for what may still be compiled in vain.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)
