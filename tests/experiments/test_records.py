"""Records of results: one per key, sorted, written atomically, and traceable to a commit."""

import json
import subprocess

import pytest

from experiments.lib import provenance, records


def read(file):
  return [(x["key"], x["metrics"]) for x in map(json.loads, file.read_text().splitlines())]


@pytest.fixture
def out(tmp_path):
  return records.Records(tmp_path / "name" / "records.jsonl", dict(commit="abc"))


def test_a_record_replaces_the_one_with_its_key(out):
  out.write(dict(a=1, b="x"), dict(y=1))
  out.write(dict(a=2, b="x"), dict(y=2))
  out.write(dict(a=1, b="x"), dict(y=3), seconds=1.23)
  assert read(out.path) == [({"a": 1, "b": "x"}, {"y": 3}), ({"a": 2, "b": "x"}, {"y": 2})]
  assert json.loads(out.path.read_text().splitlines()[0])["provenance"] == dict(
    commit="abc", seconds=1.2
  )


def test_records_are_sorted_by_key(out):
  for length in (1024, 512, None, 64):
    for name in ("b", "a"):
      out.write(dict(name=name, length=length), {})
  keys = [tuple(key.values()) for key, _ in read(out.path)]
  assert keys == [(name, length) for name in ("a", "b") for length in (None, 64, 512, 1024)]


def test_an_error_keeps_the_old_file(out, monkeypatch):
  out.write(dict(a=1), dict(y=1))
  before = out.path.read_text()
  with pytest.raises(ValueError, match="not JSON compliant"):
    out.write(dict(a=2), dict(y=float("nan")))

  def fail(*_):
    raise OSError("no space left")

  monkeypatch.setattr("deltanet_jax.files.sync", fail)
  with pytest.raises(OSError, match="no space"):
    out.write(dict(a=2), dict(y=2))
  assert out.path.read_text() == before
  assert [path.name for path in out.path.parent.iterdir()] == ["records.jsonl"]


def test_has_finds_only_records_of_this_commit(out):
  out.write(dict(a=1), {})
  made_by = lambda origin, again=False: records.Records(out.path, origin, again)
  assert out.has(dict(a=1)) and not out.has(dict(a=2))
  assert not made_by(dict(commit="def")).has(dict(a=1))
  assert not made_by(dict(commit="abc", modified=True)).has(dict(a=1))
  assert not made_by(dict(commit="abc"), again=True).has(dict(a=1))


@pytest.fixture
def checkout(tmp_path):
  """A repository with one module, one document and one file of results."""
  for name in ("deltanet_jax/a.py", "README.md", "experiments/results/x/records.jsonl"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("1\n")
  who = ("-c", "user.name=a", "-c", "user.email=a@b")
  for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "first")):
    subprocess.run(["git", *words], cwd=tmp_path, check=True)
  return tmp_path


@pytest.mark.parametrize("name", ["README.md", "experiments/results/x/records.jsonl", "notes.txt"])
def test_documentation_and_results_may_be_modified(checkout, name):
  (checkout / name).write_text("2\n")
  records.check_committed(checkout, allow_modified=False)
  assert len(provenance.commit(checkout)) == 12


@pytest.mark.parametrize("name", ["deltanet_jax/a.py", "deltanet_jax/ops/new.py"])
def test_uncommitted_code_is_rejected(checkout, name):
  path = checkout / name
  path.parent.mkdir(exist_ok=True)
  path.write_text("2\n")
  with pytest.raises(ValueError, match=rf"^uncommitted code \({name}\): .*--allow_modified"):
    records.check_committed(checkout, allow_modified=False)
  records.check_committed(checkout, allow_modified=True)


def test_a_folder_without_git_is_rejected(tmp_path):
  with pytest.raises(ValueError, match=r"is not a git checkout.*--allow_modified"):
    records.check_committed(tmp_path, allow_modified=False)


def test_recorded_commands_hide_paths_outside_the_checkout(monkeypatch):
  words = ["--corpus=/home/somebody/novels", "--config=experiments/configs/lm.py:x", "--rate=1e-3"]
  monkeypatch.setattr("sys.argv", ["x", *words])
  monkeypatch.chdir(provenance.CHECKOUT)
  recorded = provenance.command().split()[-3:]
  assert recorded == ["--corpus=.../novels", *words[1:]]


FILES = sorted((provenance.CHECKOUT / "experiments/results").rglob("records.jsonl"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_committed_records_are_sorted_and_name_commits(file):
  found = [json.loads(line) for line in file.read_text().splitlines()]
  assert found and found == sorted(found, key=lambda x: records.sort_key(x["key"]))
  assert len({json.dumps(x["key"], sort_keys=True) for x in found}) == len(found)
  for record in found:
    assert set(record) == {"key", "metrics", "provenance"}
    origin = record["provenance"]
    assert "modified" not in origin and not origin["commit"].endswith("-modified"), record["key"]
    assert origin["commit"] != "unknown", record["key"]
