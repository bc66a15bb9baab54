"""Evaluate a model on tasks of lm-evaluation-harness, and compare with a row of the paper."""

import statistics
from collections.abc import Iterator, Sequence

from deltanet_jax.config import nearest
from deltanet_jax.eval.harness import TASKS, HarnessLM, Result, package, run
from experiments.lib import evaluation, paper_tables
from experiments.lib.tables import table

# The columns that the paper's column "average" is the mean of.
_AVERAGED = paper_tables.TABLE1[2:8]


def paper_row(name: str) -> paper_tables.PaperRow:
  """The row that --paper_row names."""
  rows = paper_tables.paper_rows()
  if name not in rows:
    raise ValueError(
      f"--paper_row is {name!r}{nearest(name, rows)}, expected one of {', '.join(rows)}."
    )
  return rows[name]


def evaluate(
  subject: evaluation.Subject,
  tasks: Sequence[str],
  *,
  batch: int | None,
  length: int | None,
  bos: bool,
  local_data: str | None,
  limit: int | None,
  include_path: str | None = None,
) -> Iterator[tuple[Result, dict, dict[str, str]]]:
  """Yield for each task: its result, settings for the record's key, versions and hashes."""
  tokenizer = evaluation.tokenizer_of(subject)
  length = length or subject.config.data.length
  batch = batch or subject.config.data.batch
  model = HarnessLM(subject.model, tokenizer, batch=batch, max_length=length, bos=bos)
  options = dict(local_data=local_data, limit=limit, include_path=include_path)
  for result in run(model, tasks, **options):
    settings = dict(task=result.task, length=length, bos=bos, limit=limit, data=result.data[:12])
    if result.fewshot:
      settings |= dict(fewshot=result.fewshot)
    versions = package.versions() | dict(task_version=result.version, data=result.data)
    yield result, settings, versions | dict(tokenizer=tokenizer.hash)


def comparison(results: list[Result], name: str, paper: paper_tables.PaperRow) -> str:
  """A table of the metrics that the paper reports: percentages, and perplexities.

  Metrics of tasks that are not in the paper are shown as the harness reports them.
  """
  lines, found = [], {}
  for result in results:
    for metric, value in result.paper().items():
      scale = 1 if "perplexity" in metric or result.task not in TASKS else 100
      digits = 2 if result.task in TASKS else 4
      found[result.task, metric] = scale * value
      error = result.errors.get(metric)
      theirs = paper_tables.paper_value(result.task, metric, paper)
      lines.append(
        [
          result.task,
          metric,
          f"{scale * value:.{digits}f}",
          "–" if error is None else f"{scale * error:.{digits}f}",
          str(result.documents),
          "–" if theirs is None else f"{theirs:.2f}",
        ]
      )
  if found.keys() >= set(_AVERAGED):
    mean = lambda x: statistics.fmean(x[column] for column in _AVERAGED)
    theirs = f"{mean(paper):.2f}" if paper.keys() >= set(_AVERAGED) else "–"
    lines.append(["average", "of six", f"{mean(found):.2f}", "–", "–", theirs])
  header = ["task", "metric", "here", "standard error", "documents", f"paper, {name}"]
  return table(header, lines)
