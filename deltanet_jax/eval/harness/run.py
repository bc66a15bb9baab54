"""Evaluate a model on tasks of lm-evaluation-harness."""

import dataclasses
import hashlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence

from deltanet_jax.eval.harness import package
from deltanet_jax.eval.harness.by_name import NamedTasks
from deltanet_jax.eval.harness.model import HarnessLM
from deltanet_jax.eval.harness.tasks import TASKS, open_tasks, resolve
from deltanet_jax.files import as_local_path


@dataclasses.dataclass(frozen=True)
class Result:
  """Metrics of one task.

  Attributes:
    metrics: by their names in the harness, and the filter's if a task has several.
    errors: standard errors of the metrics that are means over documents.
    documents: number of documents evaluated.
    data: sha256 of the documents in order.
    version: of the task's definition.
    fewshot: examples in the context of each document.
  """

  task: str
  metrics: dict[str, float]
  errors: dict[str, float]
  documents: int
  data: str
  version: str
  seconds: float
  fewshot: int = 0

  def paper(self) -> dict[str, float]:
    """Return the metrics in the paper's tables; all metrics of a task that is not there."""
    names = TASKS[self.task].metrics if self.task in TASKS else self.metrics
    return {name: self.metrics[name] for name in names}


def run(
  model: HarnessLM,
  names: Sequence[str],
  *,
  local_data: str | pathlib.Path | None = None,
  limit: int | None = None,
  include_path: str | pathlib.Path | None = None,
) -> Iterator[Result]:
  """Yield the result of each task when it is done.

  All data are loaded before the first evaluation. Tasks of `TASKS` are evaluated zero-shot, others
  as they are defined; a group or tag of the harness yields a result for each of its tasks.

  Args:
    names: of `TASKS` or `SHORT`, of the harness, or of `include_path`.
    local_data: folder with `<task>.jsonl` for each task of `TASKS`, instead of the hub.
    limit: maximum number of documents per task.
    include_path: folder with task definitions of the user's in the harness's YAML format.

  Raises:
    ValueError: there is no task of a name, or its definition or data cannot be read.
  """
  others = NamedTasks(include_path)
  names = resolve(names, others)
  local_data = None if local_data is None else as_local_path(local_data, "local_data")
  named = [name for name in names if name not in TASKS]
  if named and local_data is not None:
    raise ValueError(
      f"--local_data has data for the tasks of the paper's tables, not for {named[0]}: define a"
      " task with `dataset_path: json`, and name its folder by --include_path."
    )
  with tempfile.TemporaryDirectory() as folder:
    opened: dict[str, list] = {}
    for name in names:
      if name in TASKS:
        opened[name] = open_tasks(name, local_data, pathlib.Path(folder))
      else:
        opened |= {leaf: [task] for leaf, task in others.load(name).items()}
    for name, tasks in opened.items():
      yield _evaluate(model, name, tasks, limit)


def _evaluate(model: HarnessLM, name: str, tasks: list, limit: int | None) -> Result:
  start = time.perf_counter()
  manager = package.load("lm_eval.tasks").TaskManager(include_defaults=False)
  found = package.load("lm_eval.evaluator").simple_evaluate(
    model=model,
    tasks=tasks,
    task_manager=manager,
    num_fewshot=0 if name in TASKS else None,
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
    key, _, chosen = metric.partition(",")
    values = [x.get(key) for x in samples if chosen in ("", x["filter"])]
    numbers = len(values) > 1 and all(isinstance(x, int | float) for x in values)
    # Only for means: a perplexity is not the mean over its documents.
    if numbers and abs(statistics.fmean(values) - metrics[metric]) < 1e-9:
      errors[metric] = statistics.stdev(values) / len(values) ** 0.5
  # A task with several filters has a sample for each.
  samples = [x for x in samples if x["filter"] == samples[0]["filter"]]
  hashed = hashlib.sha256("".join(sample["doc_hash"] for sample in samples).encode())
  versions = {str(found["versions"][task]) for task in counts}
  seconds = time.perf_counter() - start
  version = ", ".join(sorted(versions))
  fewshot = max(found["n-shot"][task] for task in counts)
  data = hashed.hexdigest()
  return Result(name, metrics, errors, len(samples), data, version, seconds, fewshot)


def _metrics(of_task: dict) -> dict[str, float]:
  """Return values by metric name; the harness appends the name of a filter, kept if several."""
  numbers = {name: value for name, value in of_task.items() if isinstance(value, int | float)}
  numbers = {name: float(x) for name, x in numbers.items() if "," in name}
  numbers = {name: x for name, x in numbers.items() if not name.split(",")[0].endswith("_stderr")}
  if len({name.partition(",")[2] for name in numbers}) > 1:
    return numbers
  return {name.partition(",")[0]: x for name, x in numbers.items()}


def _mean(of_tasks: dict[str, dict[str, float]], counts: dict[str, int]) -> dict[str, float]:
  """Return the mean over tasks, weighted by their number of documents."""
  total = sum(counts.values())
  names = list(next(iter(of_tasks.values())))
  return {
    name: sum(of_tasks[task][name] * counts[task] for task in counts) / total for name in names
  }
