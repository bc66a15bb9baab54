"""The evaluate command: reproduces the validation of a run, and evaluates on other texts."""

import json
import math

import pytest

from deltanet_jax.data import load_tokenizer, open_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.interop import save_fla
from deltanet_jax.train import load_trained, save_weights
from experiments.lib import evaluation
from tests.data.test_tokenizer import FILES, hugging_face
from tests.support.training import launch, numbers, tiny, train_on, wait_for_exit

ARGUMENTS = dict(length=None, batch=None)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
  cfg = tiny()
  cfg.data.corpus = str(corpus.train.folder)
  workdir = tmp_path_factory.mktemp("evaluated") / "run"
  train_on(corpus, cfg, workdir)
  return workdir


def measured(subject, split, batches=None, **sizes):
  cfg = evaluation.configure(subject, **ARGUMENTS | sizes)
  return evaluation.measure(subject, cfg, split, batches)


def last(workdir):
  """Return the last validation that the run logged."""
  row = [row for row in numbers(workdir) if "validation_loss" in row][-1]
  return {name.removeprefix("validation_"): x for name, x in row.items() if name != "step"}


def test_the_last_validation_is_reproduced_exactly(run, corpus, tmp_path):
  subject = evaluation.open_run(run, None, None)
  found = measured(subject, evaluation.own_corpus(subject).validation)
  assert found.pop("perplexity") == math.exp(found["loss"])
  assert found == last(run)
  save_weights(load_trained(run), tmp_path / "weights")
  exported = evaluation.open_run(tmp_path / "weights", None, None)
  assert exported.facts() | dict(model="run") == subject.facts()
  evaluation.check_tokens(exported, corpus)
  again = measured(exported, corpus.validation)
  assert again.pop("perplexity") and again == found
  with pytest.raises(ValueError, match="has no text of its own: name one by --corpus or --input"):
    evaluation.own_corpus(exported)


def test_a_part_of_the_text_and_another_length(run, corpus):
  subject = evaluation.open_run(run, 8, None)
  full = measured(subject, corpus.validation)
  part = measured(subject, corpus.validation, batches=1)
  assert "bits_per_byte" not in part and part["loss"] != full["loss"]
  # Documents are shorter than either length, so the loss hardly changes.
  longer = measured(subject, corpus.validation, length=48, batch=2)
  assert longer["loss"] == pytest.approx(full["loss"], rel=0.05)


def test_a_public_checkpoint_on_a_corpus_and_on_text(run, corpus, tmp_path):
  save_fla(load_trained(run).model, tmp_path / "public")
  subject = evaluation.open_public(tmp_path / "public", None)
  evaluation.check_tokens(subject, corpus)
  found = measured(subject, corpus.validation, length=32, batch=8)
  assert found["bits_per_byte"] == pytest.approx(last(run)["bits_per_byte"], rel=1e-4)
  (tmp_path / "in.txt").write_text("3 and 4 make 7. ")
  with (
    pytest.raises(ValueError, match="the tokenizer of this model is unknown"),
    evaluation.prepared(subject, tmp_path / "in.txt", "text"),
  ):
    pass
  named = evaluation.open_public(tmp_path / "public", "bytes")
  with evaluation.prepared(named, tmp_path / "in.txt", "text") as text:
    assert (text.train.tokens, text.train.bytes) == (18, 16)
    assert measured(named, text.train, length=32, batch=8)["bits_per_byte"] < 8
    with pytest.raises(ValueError, match=r"the split 'validation' of .* has no text"):
      measured(named, text.validation, length=32, batch=8)


def test_a_text_of_another_tokenizer_raises(run, corpus, tmp_path):
  (tmp_path / "in.txt").write_text("Hello world\n\n" * 50)
  tokenizer = load_tokenizer(hugging_face(tmp_path))
  prepare(tmp_path / "in.txt", tmp_path / "out", tokenizer, validation=0.2)
  subject = evaluation.open_run(run, None, None)
  with pytest.raises(ValueError, match=r"made with the tokenizer 'tokenizer\.json', .* 'bytes'"):
    evaluation.check_tokens(subject, open_corpus(tmp_path / "out"))
  with pytest.raises(ValueError, match="was trained on 'bytes': leave --tokenizer out"):
    evaluation.open_run(run, None, "mistral")
  save_fla(load_trained(run).model, tmp_path / "public")
  with pytest.raises(ValueError, match="ids, more than the 260 of the model; prepare"):
    evaluation.check_tokens(
      evaluation.open_public(tmp_path / "public", None), open_corpus(tmp_path / "out")
    )


def test_evaluate_command(run, tmp_path):
  words = ["-m", "experiments.evaluate", f"--workdir={run}", f"--out={tmp_path}/out"]
  output = wait_for_exit(launch(words))
  (row,) = map(json.loads, (tmp_path / "out/records.jsonl").read_text().splitlines())
  own = last(run)
  assert {name: row["metrics"][name] for name in own} == own
  assert f"bits_per_byte {own['bits_per_byte']:.4f}" in output and "evaluating: 100%" in output
  assert row["key"]["step"] == 12 and "experiments.evaluate" in row["provenance"]["command"]


slow = [pytest.param(x, marks=pytest.mark.slow) for x in ("generate", "export")]


@pytest.mark.parametrize("command", ["evaluate", *slow])
def test_a_missing_step_raises(run, tmp_path, command):
  more = {"evaluate": [], "generate": ["--text=3"], "export": [f"--output={tmp_path}/out"]}
  words = ["-m", f"experiments.{command}", f"--workdir={run}", "--step=3", *more[command]]
  message = wait_for_exit(launch(words), 1).splitlines()[-1]
  assert message == f"{command}: {run} has no checkpoint of step 3, only of [8, 12]."


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_a_custom_tokenizer_in_every_command(kind, tmp_path):
  text, cache = tmp_path / "in.txt", tmp_path / "cache"
  text.write_text("".join(f"{i} words and {i + 1} make {2 * i + 1}.\n\n" for i in range(400)))
  command = lambda name, *words: wait_for_exit(
    launch(["-m", f"experiments.{name}", *words], cache=cache)
  )
  path, corpus, run = FILES[kind](tmp_path), tmp_path / "corpus", tmp_path / "run"
  words = (f"--input={text}", f"--output={corpus}", f"--tokenizer={path}", "--validation=0.1")
  command("prepare_data", *words)
  config = ["--config=tests/support/tiny_config.py", "--config.model.vocab=320"]
  command("train", *config, f"--workdir={run}", f"--config.data.corpus={corpus}")
  path.unlink()
  out = f"--out={tmp_path}/out"
  command("evaluate", f"--workdir={run}", out)
  corpus.rename(tmp_path / "moved")
  assert command("generate", f"--workdir={run}", "--text=7 words").startswith("7 words")
  command("evaluate", f"--workdir={run}", f"--input={text}", out)
  command("evaluate", f"--workdir={run}", f"--corpus={tmp_path}/moved", "--split=train", out)
  command("export", f"--workdir={run}", f"--output={tmp_path}/weights")
  command("evaluate", f"--workdir={tmp_path}/weights", "--input=shipped", "--batches=1", out)
  # The public format stores the tokenizer as well.
  public = f"{tmp_path}/public"
  command("export", f"--workdir={run}", f"--output={public}", "--format=safetensors")
  assert command("generate", f"--checkpoint={public}", "--text=7 words").startswith("7 words")
  rows = [json.loads(row) for row in (tmp_path / "out/records.jsonl").read_text().splitlines()]
  by_split = {row["key"]["split"]: row["metrics"] for row in rows if row["key"]["model"] == "run"}
  own = last(run)
  assert {name: by_split["validation"][name] for name in own} == own
  assert by_split["all"]["bytes"] == by_split["train"]["bytes"] + by_split["validation"]["bytes"]
  assert {row["key"]["text"] for row in rows} == {"corpus", "moved", "in.txt", "shipped"}
