"""Tasks of the paper's tables as defined by the harness, on data of the hub or of local files.

A local file is `FOLDER/<task>.jsonl` with the columns of the hub's dataset. `by_name` opens other
tasks.
"""

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import yaml

from deltanet_jax.config import nearest
from deltanet_jax.eval.harness import hub, package
from deltanet_jax.eval.harness.by_name import NamedTasks, reason

# As in the papers on recall; the harness's own SQuAD task generates up to a blank line.
RECALL_GENERATION = dict(until=["\n"], max_gen_toks=48)


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A task of the harness.

  Attributes:
    definition: path of its YAML file in the harness's tasks; a glob pattern for several tasks.
    columns: of its data that are read.
    split: to evaluate.
    metrics: those in the paper's tables, the first in table 1; others are reported too.
    recall: name of the harness's class, for a task of the recall papers.
  """

  definition: str
  columns: tuple[str, ...]
  split: str
  metrics: tuple[str, ...]
  recall: str | None = None


_CHOICES = ("choices", "answerKey")
_RECALL = dict(columns=("text", "value"), split="validation", metrics=("contains",))
TASKS: dict[str, Benchmark] = {
  "wikitext": Benchmark("wikitext/wikitext.yaml", ("page",), "test", ("word_perplexity",)),
  "lambada_openai": Benchmark(
    "lambada/lambada_openai.yaml", ("text",), "test", ("perplexity", "acc")
  ),
  "piqa": Benchmark("piqa/piqa.yaml", ("goal", "sol1", "sol2", "label"), "validation", ("acc",)),
  "hellaswag": Benchmark(
    "hellaswag/hellaswag.yaml",
    ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "validation",
    ("acc_norm",),
  ),
  "winogrande": Benchmark(
    "winogrande/default.yaml",
    ("sentence", "option1", "option2", "answer"),
    "validation",
    ("acc",),
  ),
  "arc_easy": Benchmark("arc/arc_easy.yaml", ("question", *_CHOICES), "test", ("acc", "acc_norm")),
  "arc_challenge": Benchmark(
    "arc/arc_challenge.yaml", ("question", *_CHOICES), "test", ("acc_norm",)
  ),
  "swde": Benchmark("swde/swde.yaml", recall="SWDE", **_RECALL),
  "squad_completion": Benchmark(
    "squad_completion/squad_completion.yaml", recall="SQUADCompletion", **_RECALL
  ),
  "fda": Benchmark("fda/fda.yaml", recall="FDA", **_RECALL),
  "openbookqa": Benchmark(
    "openbookqa/openbookqa.yaml", ("question_stem", *_CHOICES), "test", ("acc_norm",)
  ),
  "mmlu": Benchmark(
    "mmlu/default/mmlu_*.yaml", ("question", "subject", "choices", "answer"), "test", ("acc",)
  ),
  "social_iqa": Benchmark(
    "siqa/siqa.yaml",
    ("context", "question", "answerA", "answerB", "answerC", "label"),
    "validation",
    ("acc",),
  ),
  "boolq": Benchmark(
    "super_glue/boolq/default.yaml", ("passage", "question", "label"), "validation", ("acc",)
  ),
}
# Aliases of tasks and of groups of tasks.
SHORT: dict[str, tuple[str, ...]] = {
  "lambada": ("lambada_openai",),
  "squad": ("squad_completion",),
  "siqa": ("social_iqa",),
  "obqa": ("openbookqa",),
  "recall": ("swde", "squad_completion", "fda"),
  "table1": tuple(TASKS)[:10],
  "table2": ("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande", "mmlu"),
}


def resolve(names: Iterable[str], others: NamedTasks | None = None) -> list[str]:
  """Expand aliases to task names, without duplicates.

  Args:
    others: tasks that are neither in `TASKS` nor in `SHORT`; None: those of the harness.

  Raises:
    ValueError: there is no task of a name.
  """
  others = others or NamedTasks()
  if twice := sorted({*TASKS, *SHORT} & set(others.own)):
    raise ValueError(
      f"{twice[0]!r} of --include_path is the name of a task of the paper's tables: rename it."
    )
  found: dict[str, None] = {}
  for name in names:
    if name not in TASKS and name not in SHORT:
      others.check(name, TASKS, SHORT)
    found |= dict.fromkeys(SHORT.get(name, (name,)))
  return list(found)


def open_tasks(name: str, local_data: pathlib.Path | None, folder: pathlib.Path) -> list[Any]:
  """Load a task with its data; several if the harness has one per subject.

  Args:
    local_data: folder of local files; None: the hub.
    folder: for temporary files that are needed until the tasks are evaluated.
  """
  bench = TASKS[name]
  if local_data is None:
    with hub.offline_if_unreachable(name):
      return _build(name, bench, None, folder)
  file = _local_file(name, bench, local_data)
  try:
    return _build(name, bench, file, folder)
  except Exception as e:  # the harness and its templates raise errors of any type
    raise ValueError(f"{file} has no data that the task {name} can read: {reason(e)}.") from e


def _build(name: str, bench: Benchmark, file: pathlib.Path | None, folder: pathlib.Path) -> list:
  if bench.recall:
    return [_recall_task(name, bench, file, folder)]
  root = pathlib.Path(package.load("lm_eval.tasks").__file__).parent
  definitions = sorted(root.glob(bench.definition))
  if not definitions:
    raise ValueError(
      f"the installed lm-eval has no {bench.definition}: use that of constraints.txt."
    )
  if file is None:
    specs = [str(path) for path in definitions]
  elif len(definitions) == 1:
    specs = [_on_file(name, definitions[0], bench, file, folder)]
  else:
    specs = list(_by_subject(definitions, bench, file, folder))
  manager = package.load("lm_eval.tasks").TaskManager(include_defaults=False)
  return list(manager.load(specs)["tasks"].values())


def _on_file(name, definition, bench: Benchmark, file, folder: pathlib.Path) -> str:
  """Write a definition that includes the harness's own, with other data; return its path."""
  splits = dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split"))
  data = dict(data_files={bench.split: str(file)}, cache_dir=str(folder / "cache"))
  own = dict(include=str(definition), task=name, dataset_path="json", dataset_name=None)
  own |= splits | {f"{bench.split}_split": bench.split} | dict(dataset_kwargs=data)
  path = folder / f"{name}.yaml"
  path.write_text(yaml.safe_dump(own))
  return str(path)


def _by_subject(definitions, bench: Benchmark, file: pathlib.Path, folder: pathlib.Path):
  """Yield a definition for every subject in a file, with the lines of that subject."""
  lines: dict[str, list[str]] = {}
  for line in file.read_text().splitlines():
    lines.setdefault(json.loads(line)["subject"], []).append(line)
  known = {path.stem: path for path in definitions}
  for subject, own in lines.items():
    task = f"mmlu_{subject}"
    if task not in known:
      raise ValueError(f"there is no subject {subject!r}{nearest(task, known)}")
    part = folder / f"{task}.jsonl"
    part.write_text("".join(f"{line}\n" for line in own))
    yield _on_file(task, known[task], bench, part, folder)


def _recall_task(name: str, bench: Benchmark, file: pathlib.Path | None, folder: pathlib.Path):
  """Load a task of the recall papers, which are classes with hard-wired data in the harness."""
  base = getattr(importlib.import_module(f"lm_eval.tasks.{name}.task"), bench.recall)

  class RecallTask(base):
    def download(self, dataset_kwargs=None, **options):
      if file is None:
        return super().download(dataset_kwargs, **options)
      files = {bench.split: str(file)}
      self.dataset = package.load("datasets").load_dataset(
        "json", data_files=files, cache_dir=str(folder / "cache")
      )

    def construct_requests(self, doc, ctx, **options):
      requests = super().construct_requests(doc, ctx, **options)
      for request in requests:
        request.arguments = (request.arguments[0], dict(RECALL_GENERATION))
      return requests

  task = RecallTask()
  task.config.task = name
  return task


def _local_file(name: str, bench: Benchmark, folder: pathlib.Path) -> pathlib.Path:
  """Return the local file of a task after checking its columns in the first line."""
  path = folder / f"{name}.jsonl"
  wanted = f"JSON lines with {', '.join(bench.columns)}"
  if not path.is_file():
    raise ValueError(f"{path} does not exist: the task {name} needs it, {wanted}.")
  first = path.read_text().partition("\n")[0]
  try:
    missing = [column for column in bench.columns if column not in json.loads(first)]
  except ValueError as e:
    raise ValueError(f"the first line of {path} is not JSON: expected {wanted}.") from e
  if missing:
    raise ValueError(f"{path} has no column {missing[0]!r}: the task {name} needs {wanted}.")
  return path
