"""Evaluates a model on tasks, one after the other."""

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


@dataclasses.dataclass(frozen=True)
class Result:
  """What one task says of a model.

  Attributes:
    metrics: by name, as the harness calls them.
    errors: standard errors of those that are means over documents.
    documents: how many were read.
    data: sha256 of them, in their order.
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
    """The metrics that the paper's tables have."""
    return {name: self.metrics[name] for name in TASKS[self.task].metrics}


def run(
  model: HarnessLM,
  names: Sequence[str],
  *,
  local_data: str | pathlib.Path | None = None,
  limit: int | None = None,
) -> Iterator[Result]:
  """Results of tasks as they are known, without examples in the context.

  All data are found before anything is computed.

  Args:
    names: of `TASKS` or `SHORT`.
    local_data: folder with `<task>.jsonl` for each, instead of the hub.
    limit: only the first so many documents of each.
  """
  names = resolve(names)
  local_data = None if local_data is None else pathlib.Path(local_data)
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
    # Errors are computed below: the harness would draw samples in forked processes.
    bootstrap_iters=0,
    batch_size=model.batch,
  )
  samples = [sample for task in sorted(found["samples"]) for sample in found["samples"][task]]
  counts = {task: len(of_task) for task, of_task in found["samples"].items()}
  metrics = _mean({task: _figures(found["results"][task]) for task in counts}, counts)
  errors = {}
  for metric in metrics:
    values = [sample.get(metric) for sample in samples]
    numbers = len(values) > 1 and all(isinstance(x, int | float) for x in values)
    # Only of means: a perplexity is made of pairs, or is no mean.
    if numbers and abs(statistics.fmean(values) - metrics[metric]) < 1e-9:
      errors[metric] = statistics.stdev(values) / len(values) ** 0.5
  hashed = hashlib.sha256("".join(sample["doc_hash"] for sample in samples).encode())
  versions = {str(found["versions"][task]) for task in counts}
  seconds = time.perf_counter() - start
  version = ", ".join(sorted(versions))
  return Result(name, metrics, errors, len(samples), hashed.hexdigest(), version, seconds)


def _figures(of_task: dict) -> dict[str, float]:
  """Numbers by the names of their metrics; the harness adds that of a filter."""
  numbers = {name: value for name, value in of_task.items() if isinstance(value, int | float)}
  numbers = {name.partition(",")[0]: float(x) for name, x in numbers.items() if "," in name}
  return {name: x for name, x in numbers.items() if not name.endswith("_stderr")}


def _mean(of_tasks: dict[str, dict[str, float]], counts: dict[str, int]) -> dict[str, float]:
  """Over tasks, by the number of their documents."""
  total = sum(counts.values())
  names = list(next(iter(of_tasks.values())))
  return {
    name: sum(of_tasks[task][name] * counts[task] for task in counts) / total for name in names
  }
