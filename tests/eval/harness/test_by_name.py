"""Tasks of the user's folder, and of the harness by name; offline."""

import pathlib
import re

import pytest

from deltanet_jax.data import load_tokenizer
from deltanet_jax.eval.harness import HarnessLM, hub, package, resolve, run
from deltanet_jax.eval.harness.by_name import NamedTasks
from tests.support.training import ROOT

SECTION = (ROOT / "experiments/README.md").read_text().partition("**Your own tasks**")[2]
YAML, DATA = (re.search(rf"```{x}\n(.*?)```", SECTION, re.DOTALL)[1] for x in ("yaml", "json"))
GENERATE = """
task: echo
dataset_path: json
dataset_kwargs:
  data_files:
    test: colours.jsonl
test_split: test
fewshot_split: test
num_fewshot: 1
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 4
filter_list:
  - name: strict
    filter:
      - function: take_first
  - name: loose
    filter:
      - function: lowercase
      - function: take_first
metric_list:
  - metric: exact_match
tag: mine
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The working directory of a user with two tasks; the hub is not asked."""
  (tmp_path / "my_tasks").mkdir()
  (tmp_path / "my_tasks/colours.yaml").write_text(f"{YAML}tag: mine\n")
  (tmp_path / "my_tasks/echo.yaml").write_text(GENERATE)
  (tmp_path / "colours.jsonl").write_text(DATA)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(hub, "unreachable_reason", lambda: pytest.fail("asked the hub"))
  monkeypatch.setattr(package.load("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
  return pathlib.Path("my_tasks")


@pytest.fixture(scope="module")
def lm(model):
  return HarnessLM(model, load_tokenizer("bytes"), batch=4, max_length=64, progress=False)


def test_a_task_of_the_user(lm, folder):
  (result,) = run(lm, ["colours"], include_path=folder)
  assert result.task == "colours" and result.documents == 2 and result.fewshot == 0
  assert 0 <= result.metrics["acc"] <= 1 and "acc" in result.errors
  assert result.paper() == result.metrics
  (limited,) = run(lm, ["colours"], include_path=folder, limit=1)
  assert limited.documents == 1


def test_filters_and_examples_of_a_definition(lm, folder):
  (result,) = run(lm, ["echo"], include_path=folder)
  assert set(result.metrics) == {"exact_match,strict", "exact_match,loose"}
  assert result.documents == 2 and result.fewshot == 1


def test_a_tag_yields_its_tasks(lm, folder):
  assert [result.task for result in run(lm, ["mine"], include_path=folder)] == ["colours", "echo"]


@pytest.mark.parametrize(
  "name, content, message",
  [
    (
      "colors",
      None,
      r"the task is 'colors' \(nearest: colours\), .* of my_tasks, or an alias: lam",
    ),
    ("colours", "a: [", r"my_tasks/other\.yaml is not a task definition of lm-evaluation-harness"),
    ("piqa", "task: piqa", "'piqa' of --include_path is the name of a task of the paper's tables"),
    (
      "other",
      YAML.replace("colours", "other"),
      r"the task other of my_tasks/other\.yaml cannot be loaded: .*other\.jsonl.*; correct",
    ),
  ],
)
def test_wrong_tasks(lm, folder, name, content, message, monkeypatch):
  if content is None:  # without the index of the harness, which takes seconds to build
    own = NamedTasks._manager
    monkeypatch.setattr(NamedTasks, "_manager", lambda self, _: own(self, True))
  else:
    (folder / "other.yaml").write_text(content)
  with pytest.raises(ValueError, match=message):
    list(run(lm, [name], include_path=folder))


def test_wrong_folders(lm, folder, tmp_path):
  with pytest.raises(ValueError, match="--include_path=nowhere is not a folder: expected task"):
    NamedTasks("nowhere")
  with pytest.raises(ValueError, match=r"has no \.yaml file: expected task definitions"):
    (tmp_path / "empty").mkdir()
    NamedTasks(tmp_path / "empty")
  with pytest.raises(ValueError, match="not for colours: define a task with `dataset_path: json`"):
    list(run(lm, ["colours"], include_path=folder, local_data=tmp_path))


def test_any_task_of_the_harness(lm, monkeypatch, tmp_path):
  """Its names are known; its data need the hub."""
  assert resolve(["sciq", "blimp", "piqa"]) == ["sciq", "blimp", "piqa"]
  monkeypatch.setattr(hub, "unreachable_reason", lambda: "no network")
  monkeypatch.setattr(package.load("datasets").config, "HF_DATASETS_CACHE", tmp_path)
  with pytest.raises(ValueError, match=r"data of the task sciq are unavailable: .*\(no network\)"):
    list(run(lm, ["sciq"]))
  with pytest.raises(ValueError, match=r"'arc_esy' \(nearest: arc_easy"):
    resolve(["arc_esy"])
  with pytest.raises(
    ValueError, match=r"'scqi_mcq' \(nearest: .*\), expected a task, group or tag"
  ):
    resolve(["scqi_mcq"])
