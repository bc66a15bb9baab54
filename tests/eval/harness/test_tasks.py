"""Every task of the paper's tables runs by name, on local files in its schema."""

import json
import math
import os
import subprocess
import sys
import time

import pytest

from deltanet_jax.data import load_tokenizer
from deltanet_jax.eval.harness import TASKS, HarnessLM, resolve, run
from deltanet_jax.eval.harness.tasks import SHORT
from tests.support import harness_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp("harness")
  harness_data.write(folder)
  return folder


@pytest.fixture(scope="module")
def lm(model):
  return HarnessLM(model, load_tokenizer("bytes"), batch=8, max_length=64, progress=False)


def test_every_task_of_the_paper_runs_on_local_files(lm, data):
  assert set(harness_data.DATA) == set(TASKS) and len(SHORT["table1"]) == 10
  results = {result.task: result for result in run(lm, list(TASKS), local_data=data)}
  assert list(results) == list(TASKS)
  for name, result in results.items():
    assert result.documents == len(harness_data.DATA[name])
    assert len(result.data) == 64 and result.version
    for metric, value in result.paper().items():
      is_rate = "perplexity" not in metric
      assert math.isfinite(value) and (0 <= value <= 1 if is_rate else value > 1)
  assert {"acc", "acc_norm"} <= set(results["arc_easy"].metrics)
  assert {"byte_perplexity", "bits_per_byte"} <= set(results["wikitext"].metrics)
  assert results["piqa"].errors["acc"] >= 0 and "perplexity" not in results["piqa"].errors


def test_correct_answers_get_perfect_metrics(data, monkeypatch):
  """The metrics are those of the harness."""

  class Oracle(HarnessLM):
    def __init__(self):
      self.batch = 1
      self._rank, self._world_size = 0, 1

    def loglikelihood(self, requests):
      right = {"Add ice to it.", "Turn the handle.", "4", "D"}
      return [(0.0 if x.args[1].strip() in right else -9.0, True) for x in requests]

    def generate_until(self, requests):
      asked = [x.args[1] for x in requests]
      assert all(x == dict(until=["\n"], max_gen_toks=48) for x in asked)
      # The value of the line whose name the text ends with.
      name = lambda text: text.strip().rsplit("\n", 1)[-1]
      lines = [x.args[0] for x in requests]
      return [text.split(name(text))[1].split("\n")[0] for text in lines]

  names = ["piqa", "swde", "squad_completion", "fda"]
  results = {result.task: result.paper() for result in run(Oracle(), names, local_data=data)}
  assert results["piqa"] == dict(acc=1.0)
  assert all(results[name] == dict(contains=1.0) for name in names[1:])


def test_task_names_and_aliases():
  assert resolve(["lambada", "piqa", "lambada_openai"]) == ["lambada_openai", "piqa"]
  assert resolve(["table1"]) == [*TASKS][:10]
  with pytest.raises(ValueError, match=r"the task is 'helaswag' \(nearest: hellaswag\)"):
    resolve(["helaswag"])


def test_malformed_local_files_raise(lm, tmp_path):
  with pytest.raises(ValueError, match=r"piqa\.jsonl does not exist: the task piqa needs it, JSON"):
    list(run(lm, ["piqa"], local_data=tmp_path))
  (tmp_path / "piqa.jsonl").write_text(json.dumps(dict(goal="a", sol1="b", label=0)))
  with pytest.raises(ValueError, match="has no column 'sol2': the task piqa needs JSON lines with"):
    list(run(lm, ["piqa"], local_data=tmp_path))
  (tmp_path / "piqa.jsonl").write_text("goal, sol1")
  with pytest.raises(ValueError, match=r"the first line of .*piqa\.jsonl is not JSON"):
    list(run(lm, ["piqa"], local_data=tmp_path))
  wrong = dict(question="a", subject="astrology", choices=list("abcd"), answer=0)
  (tmp_path / "mmlu.jsonl").write_text(json.dumps(wrong))
  with pytest.raises(ValueError, match=r"no data that the task mmlu can read: .*astronomy"):
    list(run(lm, ["mmlu"], local_data=tmp_path))


def test_missing_data_raise_within_seconds(tmp_path):
  """In a separate process, with an empty cache and an unreachable hub."""
  code = """
import pathlib, sys, time
from deltanet_jax.eval.harness.tasks import open_tasks
start = time.perf_counter()
for name in ("hellaswag", "fda"):
  try:
    open_tasks(name, None, pathlib.Path(sys.argv[1]))
  except ValueError as e:
    print(e)
print(time.perf_counter() - start)
"""
  hub = dict(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
  start = time.perf_counter()
  done = subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)],
    capture_output=True,
    text=True,
    env=os.environ | hub,
  )
  assert done.returncode == 0, done.stderr
  *messages, seconds = done.stdout.splitlines()
  for name, line in zip(("hellaswag", "fda"), messages, strict=True):
    assert line.startswith(
      f"the data of the task {name} are unavailable: the hub does not answer ("
    )
    assert line.endswith("or give files by --local_data.")
  assert float(seconds) < 20 and time.perf_counter() - start < 60
