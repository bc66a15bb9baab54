"""Evaluate a trained run, exported weights or a public checkpoint: perplexity, or harness tasks.

  python -m experiments.evaluate --workdir=RUN                            # its validation split
  python -m experiments.evaluate --workdir=RUN --step=2000 --corpus=CORPUS
  python -m experiments.evaluate --workdir=RUN --input=FOLDER             # all text files in it
  python -m experiments.evaluate --checkpoint=FOLDER --tokenizer=mistral --input=shipped
  python -m experiments.evaluate --workdir=RUN --contexts=1,2,4,8         # length generalization
  python -m experiments.evaluate --workdir=RUN --tasks=table1 --paper_row=deltanet-340m
  python -m experiments.evaluate --workdir=RUN --tasks=piqa,swde --local_data=FOLDER  # no network
  python -m experiments.evaluate --workdir=RUN --tasks=mine,sciq --include_path=FOLDER

Documents are packed into sequences as in training; every token but the first of a document is
predicted once. On the corpus of the run this reproduces its last validation, bitwise on the same
devices (with --batches=eval_batches if the config sets it). Results go to OUT/records.jsonl, one
record per model and text, with machine, commit and command.

A run of a task of yours (`train --task=module:function`) is evaluated on that task; --task names
another. --evaluator=module:function adds metrics; by default those of the run.

--tasks takes any task, group or tag of lm-evaluation-harness (extra `eval`) by its name, tasks that
YAML files in --include_path define, and the groups table1, table2 and recall of the paper. Data are
downloaded from the Hugging Face hub; those of the paper's tasks may be files, FOLDER/<task>.jsonl
in the same schema. There is one record per model and task, also with versions and hashes of data
and tokenizer.
"""

from experiments.lib import early_signals  # noqa: F401, before imports that take seconds

# isort: split
import contextlib
import time

from absl import flags

from deltanet_jax import files
from deltanet_jax.data import open_corpus
from deltanet_jax.eval import evaluate
from deltanet_jax.train import Evaluator
from experiments.lib import app, evaluation, extensions, import_flag, records

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run, or of exported weights.")
_STEP = flags.DEFINE_integer(
  "step", None, "Step of the checkpoint; the latest complete one by default."
)
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder with config.json and safetensors.")
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  None,
  "Tokenizer, if the checkpoint folder has none: bytes, mistral, or the path of a tokenizer.json or"
  " SentencePiece .model.",
)
_CORPUS = flags.DEFINE_string(
  "corpus", None, "Folder written by experiments.prepare_data; the corpus of the run by default."
)
_INPUT = flags.DEFINE_string(
  "input",
  None,
  "Text to evaluate on instead of a corpus, in the formats of experiments.prepare_data: a file, a"
  " folder, or `shipped` for the bundled novels.",
)
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Field of a JSON object that has the text.")
_SPLIT = flags.DEFINE_enum("split", "validation", evaluation.SPLITS, "Split of the corpus.")
_LENGTH = flags.DEFINE_integer(
  "length",
  None,
  "Sequence length; by default that of the run, 2048 for a checkpoint.",
  lower_bound=1,
)
_BATCH = flags.DEFINE_integer(
  "batch", None, "Batch size; by default that of the run, 8 for a checkpoint.", lower_bound=1
)
_BATCHES = flags.DEFINE_integer(
  "batches",
  None,
  "Number of batches to evaluate, all by default; bits per byte need all.",
  lower_bound=1,
)
_CONTEXTS = flags.DEFINE_list(
  "contexts",
  [],
  "Also the loss, in total and by position, at these multiples of --length: 1,2,4,8.",
)
_TASK = flags.DEFINE_string(
  "task",
  None,
  "Training task of yours to evaluate on instead of a text: module:function, called with the"
  " config, or the name of an entry point in deltanet_jax.tasks; by default that of the run.",
)
_EVALUATORS = flags.DEFINE_multi_string(
  "evaluator",
  [],
  "Evaluator of yours: module:function, or the name of an entry point in deltanet_jax.evaluators;"
  " repeatable. By default those of the run, on its own text or task.",
)
_TASKS = flags.DEFINE_list("tasks", None, "Tasks of lm-evaluation-harness instead of a text.")
_INCLUDE_PATH = flags.DEFINE_string(
  "include_path", None, "Folder with task definitions of yours, YAML of lm-evaluation-harness."
)
_LOCAL_DATA = flags.DEFINE_string(
  "local_data", None, "Folder with <task>.jsonl of each task; by default data are downloaded."
)
_LIMIT = flags.DEFINE_integer(
  "limit", None, "Number of documents per task, all by default.", lower_bound=1
)
_BOS = flags.DEFINE_bool(
  "bos", True, "Start the context of tasks with bos, as documents in training do."
)
_PAPER_ROW = flags.DEFINE_string(
  "paper_row", "deltanet-340m", "Row of the paper's tables to compare results of tasks with."
)
flags.DEFINE_alias("beside", "paper_row")  # its name before version 0.2
_OUT = flags.DEFINE_string("out", "results/evaluate", "Folder for records.jsonl.")
_RECORD = flags.DEFINE_bool("record", False, "Also write records to experiments/results/evaluate.")


def subject(*, text: bool = True) -> evaluation.Subject:
  if bool(_WORKDIR.value) == bool(_CHECKPOINT.value):
    raise ValueError("set either --workdir or --checkpoint; see --help.")
  if _WORKDIR.value:
    return evaluation.open_run(_WORKDIR.value, _STEP.value, _TOKENIZER.value, text=text)
  if _STEP.value is not None:
    raise ValueError("--step needs --workdir: a public checkpoint has no steps.")
  return evaluation.open_public(_CHECKPOINT.value, _TOKENIZER.value)


@contextlib.contextmanager
def split(model: evaluation.Subject):
  """Yield the name of the text that the flags select, its corpus and its split."""
  if _INPUT.value:
    with evaluation.prepared(model, _INPUT.value, _TEXT_FIELD.value) as corpus:
      yield files.as_local_path(_INPUT.value, "--input").resolve().name, corpus, corpus.train
    return
  corpus = open_corpus(_CORPUS.value) if _CORPUS.value else evaluation.own_corpus(model)
  evaluation.check_tokens(model, corpus)
  yield corpus.train.folder.resolve().name, corpus, getattr(corpus, _SPLIT.value)


def main():
  import_flag.import_modules()
  texts = dict(corpus=_CORPUS.value, input=_INPUT.value, task=_TASK.value, tasks=_TASKS.value)
  if len(given := [f"--{name}" for name, value in texts.items() if value]) > 1:
    raise ValueError(f"{' and '.join(given)} exclude each other: set one of them.")
  multiples = _multiples()
  files.check_writable(files.as_local_path(_OUT.value, "--out"))
  if _TASKS.value:
    run_tasks()
    return
  if _INCLUDE_PATH.value:
    raise ValueError("--include_path needs --tasks: name the tasks to evaluate.")
  model = subject(text=bool(given) and not _TASK.value)
  named = model.history.get("origin", {})
  evaluators = extensions.open_evaluators(
    _EVALUATORS.value or ([] if given else named.get("evaluators", []))
  )
  if task := _TASK.value or (not given and named.get("task")):
    run_task(model, task, evaluators)
  else:
    if _WORKDIR.value:
      evaluation.check_text(model.folder, model.tokenizer)
    run_text(model, multiples, evaluators)


def run_tasks():
  from experiments.lib import task_results  # needs the extra `eval`

  paper = task_results.paper_row(_PAPER_ROW.value)
  model = subject()
  options = dict(batch=_BATCH.value, length=_LENGTH.value, bos=_BOS.value)
  options |= dict(local_data=_LOCAL_DATA.value, limit=_LIMIT.value)
  options |= dict(include_path=_INCLUDE_PATH.value)
  outputs, results = _open_records(), []
  key = model.facts()
  for result, settings, versions in task_results.evaluate(model, _TASKS.value, **options):
    metrics = result.metrics | dict(errors=result.errors, documents=result.documents)
    with files.writing(_OUT.value):
      for output in outputs:
        output.write(key | settings, metrics | model.remarks(), result.seconds, versions)
    results.append(result)
  print(task_results.comparison(results, _PAPER_ROW.value, paper))
  print(f"wrote {' and '.join(str(x.path) for x in outputs)}")


def _open_records() -> list[records.Records]:
  outputs = [records.open_folder(files.as_local_path(_OUT.value, "--out"))]
  return outputs + ([records.open("evaluate")] if _RECORD.value else [])


def _multiples() -> list[int]:
  """Parse --contexts."""
  try:
    found = [int(x) for x in _CONTEXTS.value]
  except ValueError:
    found = [0]
  if any(x < 1 for x in found):
    raise ValueError(
      f"--contexts is {','.join(_CONTEXTS.value)}, expected positive integers like 1,2,4,8."
    )
  return found


def run_task(model: evaluation.Subject, name: str, evaluators: list[Evaluator]):
  """Evaluate on a task of the user's."""
  if _CONTEXTS.value:
    raise ValueError("--contexts needs a text, not a task of yours: leave it out.")
  outputs, cfg = _open_records(), evaluation.configure(model, _LENGTH.value, _BATCH.value)
  task, start = extensions.open_task(name, cfg), time.perf_counter()
  if model.identity not in (None, task.identity()):
    print(f"the task {name} is not that of the run: {task.identity()}, not {model.identity}")
  metrics = evaluation.measure_task(model, cfg, task, evaluators, _BATCHES.value)
  print("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
  key = model.facts() | dict(text=name, split="validation", identity=task.identity())
  key |= dict(length=cfg.data.length, batches=_BATCHES.value)
  metrics |= dict(batch=cfg.data.batch, mesh=cfg.mesh.sizes()) | model.remarks()
  seconds = time.perf_counter() - start
  with files.writing(_OUT.value):
    for output in outputs:
      output.write(key, metrics, seconds)
  print(f"wrote {' and '.join(str(x.path) for x in outputs)}")


def run_text(model: evaluation.Subject, multiples: list[int], evaluators: list[Evaluator]):
  outputs = _open_records()
  cfg = evaluation.configure(model, _LENGTH.value, _BATCH.value)
  start = time.perf_counter()
  with split(model) as (name, corpus, part):
    metrics = evaluation.measure(model, cfg, part, _BATCHES.value)
    metrics |= evaluation.per_word(metrics, corpus, part)
    if evaluators:
      metrics |= evaluate(model.model, cfg, evaluators, model.step or 0)
    if multiples:
      metrics |= evaluation.by_context(model, cfg, part, multiples, _BATCHES.value)
    text = dict(text=name, split="all" if _INPUT.value else part.name)
    text |= dict(tokens=corpus.identity()["corpus"][:12])
    sizes = dict(documents=part.documents, tokens=part.tokens, bytes=part.bytes)
  key = model.facts() | text | dict(length=cfg.data.length, batches=_BATCHES.value)
  print("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
  metrics |= sizes | dict(batch=cfg.data.batch, mesh=cfg.mesh.sizes())
  metrics |= model.remarks()
  seconds = time.perf_counter() - start
  with files.writing(_OUT.value):
    for output in outputs:
      output.write(key, metrics, seconds)
  print(f"wrote {' and '.join(str(x.path) for x in outputs)}")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, ImportError, OSError))
