"""Perplexity on a text, or tasks, of a trained run, exported weights or a public checkpoint.

  python -m experiments.evaluate --workdir=RUN                            # on what it held out
  python -m experiments.evaluate --workdir=RUN --step=2000 --corpus=CORPUS
  python -m experiments.evaluate --workdir=RUN --input=FOLDER             # of text files, all of it
  python -m experiments.evaluate --checkpoint=FOLDER --tokenizer=mistral --input=shipped
  python -m experiments.evaluate --workdir=RUN --contexts=1,2,4,8         # length generalisation
  python -m experiments.evaluate --workdir=RUN --tasks=table1 --beside=deltanet-340m
  python -m experiments.evaluate --workdir=RUN --tasks=piqa,swde --local_data=FOLDER  # no network

Documents are packed into rows as in training, every token but the first of a document is predicted
once. On its own corpus a run's last validation comes out again, bit for bit on the same devices (if
it had eval_batches, with as many --batches). The numbers go to OUT/records.jsonl, one per model
and text, with machine, commit and command.

Tasks are those of lm-evaluation-harness (extra `eval`) that the paper's tables have, by their names
there, or table1, table2 and recall for several. Their data come from the hub, or from files
FOLDER/<task>.jsonl in the same schema. There is a row for each model and task, also with versions
and with hashes of data and tokenizer.
"""

import contextlib
import pathlib
import time

from absl import flags

from deltanet_jax.data import open_corpus
from deltanet_jax.files import writing
from experiments.lib import app, evaluation, records

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run, or of exported weights.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of a run; the newest whole one.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder with config.json and safetensors.")
_TOKENIZER = flags.DEFINE_string(
  "tokenizer",
  None,
  "Of a checkpoint without one in its folder: bytes, mistral, or the path of a tokenizer.json or"
  " SentencePiece .model.",
)
_CORPUS = flags.DEFINE_string(
  "corpus", None, "Folder that experiments.prepare_data wrote; by default that of the run."
)
_INPUT = flags.DEFINE_string(
  "input",
  None,
  "Instead of it text, as experiments.prepare_data reads it: a file, a folder, or `shipped` for the"
  " novels in this package.",
)
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "Where JSON has the text.")
_SPLIT = flags.DEFINE_enum("split", "validation", evaluation.SPLITS, "Which part of a corpus.")
_LENGTH = flags.DEFINE_integer(
  "length", None, "Tokens per row; as in the run, 2048 of a checkpoint.", lower_bound=1
)
_BATCH = flags.DEFINE_integer(
  "batch", None, "Rows at a time; as in the run, 8 of a checkpoint.", lower_bound=1
)
_BATCHES = flags.DEFINE_integer(
  "batches", None, "Only the first so many batches; there are no bits per byte then.", lower_bound=1
)
_CONTEXTS = flags.DEFINE_list(
  "contexts", [], "Also the loss in contexts of so many times --length, and by position: 1,2,4,8."
)
_TASKS = flags.DEFINE_list("tasks", None, "Tasks of lm-evaluation-harness instead of a text.")
_LOCAL_DATA = flags.DEFINE_string(
  "local_data", None, "Folder with <task>.jsonl for each task; by default data come from the hub."
)
_LIMIT = flags.DEFINE_integer(
  "limit", None, "Only the first so many documents of each task.", lower_bound=1
)
_BOS = flags.DEFINE_bool("bos", True, "Contexts of tasks begin with bos, as documents in training.")
_BESIDE = flags.DEFINE_string(
  "beside", "deltanet-340m", "Line of the paper's tables that results of tasks are shown beside."
)
_OUT = flags.DEFINE_string("out", "results/evaluate", "Folder of records.jsonl.")
_RECORD = flags.DEFINE_bool("record", False, "Also write it to experiments/results/evaluate.")


def subject() -> evaluation.Subject:
  if bool(_WORKDIR.value) == bool(_CHECKPOINT.value):
    raise ValueError("give --workdir or --checkpoint, one model; see --help.")
  if _WORKDIR.value:
    return evaluation.open_run(_WORKDIR.value, _STEP.value, _TOKENIZER.value)
  if _STEP.value is not None:
    raise ValueError("--step is of a run: a public checkpoint has one model.")
  return evaluation.open_public(_CHECKPOINT.value, _TOKENIZER.value)


@contextlib.contextmanager
def split(model: evaluation.Subject):
  """Name, identity and tokens of the text that the flags name."""
  if _INPUT.value:
    with evaluation.prepared(model, _INPUT.value, _TEXT_FIELD.value) as corpus:
      yield pathlib.Path(_INPUT.value).resolve().name, corpus, corpus.train
    return
  corpus = open_corpus(_CORPUS.value) if _CORPUS.value else evaluation.own_corpus(model)
  evaluation.check_tokens(model, corpus)
  yield corpus.train.folder.resolve().name, corpus, getattr(corpus, _SPLIT.value)


def main():
  texts = dict(corpus=_CORPUS.value, input=_INPUT.value, tasks=_TASKS.value)
  if len(given := [f"--{name}" for name, value in texts.items() if value]) > 1:
    raise ValueError(f"{' and '.join(given)} name different things to evaluate on: give one.")
  if _TASKS.value:
    run_tasks()
  else:
    run_text()


def run_tasks():
  from experiments.lib import task_results  # needs the extra `eval`

  paper = task_results.paper_line(_BESIDE.value)
  model = subject()
  options = dict(batch=_BATCH.value, length=_LENGTH.value, bos=_BOS.value)
  options |= dict(local_data=_LOCAL_DATA.value, limit=_LIMIT.value)
  rows, results = _open_rows(), []
  key = model.facts()
  for result, settings, facts in task_results.evaluate(model, _TASKS.value, **options):
    metrics = result.metrics | dict(errors=result.errors, documents=result.documents)
    with writing(_OUT.value):
      for row in rows:
        row.write(key | settings, metrics | model.remarks(), result.seconds, facts)
    results.append(result)
  print(task_results.shown(results, _BESIDE.value, paper))
  print(f"wrote {' and '.join(str(row.path) for row in rows)}")


def _open_rows() -> list[records.Records]:
  rows = [records.open_folder(pathlib.Path(_OUT.value))]
  return rows + ([records.open("evaluate")] if _RECORD.value else [])


def _multiples() -> list[int]:
  try:
    found = [int(x) for x in _CONTEXTS.value]
  except ValueError:
    found = [0]
  if any(x < 1 for x in found):
    raise ValueError(f"--contexts is {','.join(_CONTEXTS.value)}, expected numbers like 1,2,4,8.")
  return found


def run_text():
  rows, model = _open_rows(), subject()
  cfg = evaluation.configure(model, _LENGTH.value, _BATCH.value)
  start = time.perf_counter()
  with split(model) as (name, corpus, part):
    metrics = evaluation.measure(model, cfg, part, _BATCHES.value)
    metrics |= evaluation.per_word(metrics, corpus, part)
    if multiples := _multiples():
      metrics |= evaluation.by_context(model, cfg, part, multiples, _BATCHES.value)
    text = dict(text=name, split="all" if _INPUT.value else part.name)
    text |= dict(tokens=corpus.identity()["corpus"][:12])
    sizes = dict(documents=part.documents, tokens=part.tokens, bytes=part.bytes)
  key = model.facts() | text | dict(length=cfg.data.length, batches=_BATCHES.value)
  print("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
  metrics |= sizes | dict(batch=cfg.data.batch, mesh=cfg.mesh.sizes())
  metrics |= model.remarks()
  seconds = time.perf_counter() - start
  with writing(_OUT.value):
    for row in rows:
      row.write(key, metrics, seconds)
  print(f"wrote {' and '.join(str(row.path) for row in rows)}")


if __name__ == "__main__":
  app.run(main, expected=(ValueError, ImportError, OSError))
