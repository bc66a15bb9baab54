"""Rows of results: one per key, in a stable order, whole or not at all, and of a commit."""

import json
import subprocess

import pytest

from experiments.lib import provenance, records


def rows_of(file):
  return [(row["key"], row["metrics"]) for row in map(json.loads, file.read_text().splitlines())]


@pytest.fixture
def out(tmp_path):
  return records.Records(tmp_path / "name" / "records.jsonl", dict(commit="abc"))


def test_a_row_replaces_the_one_of_its_key(out):
  out.write(dict(a=1, b="x"), dict(y=1))
  out.write(dict(a=2, b="x"), dict(y=2))
  out.write(dict(a=1, b="x"), dict(y=3), seconds=1.23)
  assert rows_of(out.path) == [({"a": 1, "b": "x"}, {"y": 3}), ({"a": 2, "b": "x"}, {"y": 2})]
  assert json.loads(out.path.read_text().splitlines()[0])["provenance"] == dict(
    commit="abc", seconds=1.2
  )


def test_the_order_is_that_of_keys(out):
  for length in (1024, 512, None, 64):
    for name in ("b", "a"):
      out.write(dict(name=name, length=length), {})
  keys = [tuple(key.values()) for key, _ in rows_of(out.path)]
  assert keys == [(name, length) for name in ("a", "b") for length in (None, 64, 512, 1024)]


def test_an_error_leaves_the_old_file(out, monkeypatch):
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


def test_has_asks_for_rows_of_this_commit(out):
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
def test_documents_and_results_may_change(checkout, name):
  (checkout / name).write_text("2\n")
  records.refuse_modified(checkout, allow=False)
  assert len(provenance.commit(checkout)) == 12


@pytest.mark.parametrize("name", ["deltanet_jax/a.py", "deltanet_jax/ops/new.py"])
def test_a_modified_checkout_is_refused(checkout, name):
  path = checkout / name
  path.parent.mkdir(exist_ok=True)
  path.write_text("2\n")
  with pytest.raises(ValueError, match=rf"^uncommitted code \({name}\): .*--allow_modified"):
    records.refuse_modified(checkout, allow=False)
  records.refuse_modified(checkout, allow=True)


def test_no_checkout_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"is no git checkout.*--allow_modified"):
    records.refuse_modified(tmp_path, allow=False)


def test_paths_outside_the_checkout_are_not_told(monkeypatch):
  words = ["--corpus=/home/somebody/novels", "--config=experiments/configs/lm.py:x", "--rate=1e-3"]
  monkeypatch.setattr("sys.argv", ["x", *words])
  monkeypatch.chdir(provenance.CHECKOUT)
  told = provenance.command().split()[-3:]
  assert told == ["--corpus=.../novels", *words[1:]]


FILES = sorted((provenance.CHECKOUT / "experiments/results").rglob("records.jsonl"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_rows_in_the_repository_are_of_commits(file):
  rows = [json.loads(line) for line in file.read_text().splitlines()]
  assert rows and rows == sorted(rows, key=lambda row: records._order(row["key"]))
  assert len({json.dumps(row["key"], sort_keys=True) for row in rows}) == len(rows)
  for row in rows:
    assert set(row) == {"key", "metrics", "provenance"}
    origin = row["provenance"]
    assert "modified" not in origin and not origin["commit"].endswith("-modified"), row["key"]
    assert origin["commit"] != "unknown", row["key"]
