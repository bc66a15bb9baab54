"""Evaluate a model on tasks of lm-evaluation-harness."""

import dataclasses
import hashlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence

from deltanet_jax.eval.harness import package
from deltanet_jax.eval.harness.model import HarnessLM
from deltanet_jax.eval.harness.tasks import TASKS, open_tasks, resolve
from deltanet_jax.files import as_local_path


@dataclasses.dataclass(frozen=True)
class Result:
  """Metrics of one task.

  Attributes:
    metrics: by their names in the harness.
    errors: standard errors of the metrics that are means over documents.
    documents: number of documents evaluated.
    data: sha256 of the documents in order.
    version: of the task's definition.
  """

  task: str
  metrics: dict[str, float]
  errors: dict[str, float]
  documents: int
  data: str
  version: str
  seconds: float

  def paper(self) -> dict[str, float]:
    """Return the metrics in the paper's tables."""
    return {name: self.metrics[name] for name in TASKS[self.task].metrics}


def run(
  model: HarnessLM,
  names: Sequence[str],
  *,
  local_data: str | pathlib.Path | None = None,
  limit: int | None = None,
) -> Iterator[Result]:
  """Yield the zero-shot result of each task when it is done.

  All data are loaded before the first evaluation.

  Args:
    names: of `TASKS` or `SHORT`.
    local_data: folder with `<task>.jsonl` for each task, instead of the hub.
    limit: maximum number of documents per task.
  """
  names = resolve(names)
  local_data = None if local_data is None else as_local_path(local_data, "local_data")
  with tempfile.TemporaryDirectory() as folder:
    opened = {name: open_tasks(name, local_data, pathlib.Path(folder)) for name in names}
    for name, tasks in opened.items():
      yield _evaluate(model, name, tasks, limit)


def _evaluate(model: HarnessLM, name: str, tasks: list, limit: int | None) -> Result:
  start = time.perf_counter()
  manager = package.load("lm_eval.tasks").TaskManager(include_defaults=False)
  found = package.load("lm_eval.evaluator").simple_evaluate(
    model=model,
    tasks=tasks,
    task_manager=manager,
    num_fewshot=0,
    limit=limit,
    # Standard errors are computed below: the harness would bootstrap in forked processes.
    bootstrap_iters=0,
    batch_size=model.batch,
  )
  samples = [sample for task in sorted(found["samples"]) for sample in found["samples"][task]]
  counts = {task: len(of_task) for task, of_task in found["samples"].items()}
  metrics = _mean({task: _metrics(found["results"][task]) for task in counts}, counts)
  errors = {}
  for metric in metrics:
    values = [sample.get(metric) for sample in samples]
    numbers = len(values) > 1 and all(isinstance(x, int | float) for x in values)
    # Only for means: a perplexity is not the mean over its documents.
    if numbers and abs(statistics.fmean(values) - metrics[metric]) < 1e-9:
      errors[metric] = statistics.stdev(values) / len(values) ** 0.5
  hashed = hashlib.sha256("".join(sample["doc_hash"] for sample in samples).encode())
  versions = {str(found["versions"][task]) for task in counts}
  seconds = time.perf_counter() - start
  version = ", ".join(sorted(versions))
  return Result(name, metrics, errors, len(samples), hashed.hexdigest(), version, seconds)


def _metrics(of_task: dict) -> dict[str, float]:
  """Return values by metric name; the harness appends the name of a filter."""
  numbers = {name: value for name, value in of_task.items() if isinstance(value, int | float)}
  numbers = {name.partition(",")[0]: float(x) for name, x in numbers.items() if "," in name}
  return {name: x for name, x in numbers.items() if not name.endswith("_stderr")}


def _mean(of_tasks: dict[str, dict[str, float]], counts: dict[str, int]) -> dict[str, float]:
  """Return the mean over tasks, weighted by their number of documents."""
  total = sum(counts.values())
  names = list(next(iter(of_tasks.values())))
  return {
    name: sum(of_tasks[task][name] * counts[task] for task in counts) / total for name in names
  }
