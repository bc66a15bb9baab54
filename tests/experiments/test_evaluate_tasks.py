"""The command `evaluate` on harness tasks; exported weights give the same results."""

import functools
import json
import math

import jax
import pytest

from deltanet_jax.data import load_tokenizer, open_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.interop import save_fla
from deltanet_jax.train import load_trained, save_weights
from experiments.lib import evaluation
from tests.support import harness_data
from tests.support.training import finish, launch, tiny, train_on

BYTES = load_tokenizer("bytes")


@pytest.fixture(scope="module", autouse=True)
def as_users_run():
  """Default dtypes, because optax fails strict promotion."""
  with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A tiny model, trained for two updates."""
  folder = tmp_path_factory.mktemp("tasks")
  (folder / "in.txt").write_text("Emma was clever, and rich. Anne was kind and quiet.\n\n" * 40)
  prepare(folder / "in.txt", folder / "corpus", load_tokenizer("bytes"), validation=0.2)
  cfg = tiny(tokens=2 * 256, eval_every=2)
  cfg.data.corpus = str(folder / "corpus")
  train_on(open_corpus(folder / "corpus"), cfg, folder / "run")
  harness_data.write(folder / "data")
  return folder


def command(folder, model, *more):
  words = ["-m", "experiments.evaluate", model, f"--out={folder}/out"]
  return [*words, "--batch=4", "--length=64", *more]


def recorded(folder):
  return [json.loads(line) for line in (folder / "out/records.jsonl").read_text().splitlines()]


def test_tasks_of_a_run(run):
  data = ["--tasks=wikitext,piqa,fda", f"--local_data={run}/data", "--beside=gla-conv-1.3b"]
  output = finish(launch(command(run, f"--workdir={run}/run", *data)))
  shown = [line for line in output.splitlines() if line.startswith("|")]
  assert "paper, gla-conv-1.3b" in shown[0] and len(shown) == 5
  assert shown[2].endswith("17.25 |") and shown[3].split("|")[1].strip() == "piqa"
  assert "perplexities: 100%" in output and "generating: 100%" in output
  first = {row["key"]["task"]: row for row in recorded(run)}
  origin = first["wikitext"]["provenance"]
  assert origin["lm_eval"] and origin["datasets"] and origin["task_version"] == "2.0"
  assert len(origin["data"]) == len(origin["tokenizer"]) == 64 and origin["commit"]


def test_exported_weights_have_the_same_perplexity(run, tmp_path):
  """Exported as orbax weights, and as a public checkpoint."""
  subject = evaluation.open_run(run / "run", None, None)
  trained, corpus = load_trained(run / "run"), open_corpus(run / "corpus")
  save_weights(trained, tmp_path / "weights")
  save_fla(trained.model, tmp_path / "public")
  others = [
    evaluation.open_run(tmp_path / "weights", None, None),
    evaluation.open_public(tmp_path / "public", "bytes"),
  ]
  cfg = evaluation.configure(subject, None, None)
  found = [
    evaluation.measure(
      one, evaluation.configure(one, cfg.data.length, cfg.data.batch), corpus.validation, None
    )
    for one in (subject, *others)
  ]
  for other in found[1:]:
    assert other["perplexity"] == pytest.approx(found[0]["perplexity"], rel=1e-6)


def test_word_perplexity_and_longer_contexts(run):
  subject = evaluation.open_run(run / "run", None, None)
  corpus = open_corpus(run / "corpus")
  split = corpus.validation
  text = BYTES.decode(split.read(0, split.tokens)[0])
  for block in (7, 1 << 20):
    assert evaluation.count_words(BYTES, split, block) == len(text.split())
  cfg = evaluation.configure(subject, None, None)
  found = evaluation.measure(subject, cfg, split, None)
  more = evaluation.per_word(found, corpus, split)
  nats = found["bits_per_byte"] * math.log(2)
  assert more["byte_perplexity"] == pytest.approx(math.exp(nats))
  assert more["word_perplexity"] == pytest.approx(math.exp(nats * split.bytes / len(text.split())))
  assert evaluation.per_word(dict(loss=1.0), corpus, split) == {}
  longer = evaluation.by_context(subject, cfg, split, [1, 2], 2)
  length = cfg.data.length
  assert {f"loss_{length}", f"loss_{2 * length}", f"loss_{2 * length}_from_{length}"} <= set(longer)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  "words, expected",
  [
    (["--tasks=piqa", "--local_data=nowhere"], "evaluate: nowhere/piqa.jsonl is not there"),
    slow(["--tasks=pica"], "evaluate: the task is 'pica' (nearest: piqa)"),
    slow(
      ["--tasks=piqa", "--paper_row=gla-340"],
      "evaluate: --paper_row is 'gla-340' (nearest: gla-340m",
    ),
    slow(["--tasks=piqa", "--input=shipped"], "evaluate: --input and --tasks exclude each other"),
  ],
)
def test_wrong_flags_are_reported_in_one_line(run, words, expected):
  output = finish(launch(command(run, f"--workdir={run}/run", *words)), 1)
  assert output.splitlines()[-1].startswith(expected)
