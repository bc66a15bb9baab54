"""Runs, corpora and exports on object storage, against local S3 and GCS servers."""

import contextlib
import os
import shutil

import jax
import numpy as np
import pytest

from deltanet_jax import files, object_storage
from deltanet_jax.data import load_tokenizer, open_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.interop import load_fla, save_fla
from deltanet_jax.models.abstract import weights_of
from deltanet_jax.train import InitFrom, load_trained, save_weights, saved_steps
from tests.support import object_servers
from tests.support.training import (
  free_address,
  launch,
  numbers,
  stop_at,
  tiny,
  train_on,
  train_words,
  wait_for_exit,
)


@contextlib.contextmanager
def _serve(scheme, tmp_path_factory):
  if reason := object_servers.missing(scheme):
    pytest.skip(reason)
  folder = tmp_path_factory.mktemp(scheme)
  cache = {"XDG_CACHE_HOME": str(folder / "cache")}
  with object_servers.serve(scheme, folder) as env, pytest.MonkeyPatch.context() as patch:
    for name, value in (env | cache).items():
      patch.setenv(name, value)
    object_storage._store.cache_clear()
    yield f"{scheme}://bucket"
  object_storage._store.cache_clear()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
  """URL of a bucket; the cache folder of the user is temporary."""
  with _serve("s3", tmp_path_factory) as url:
    yield url


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request, tmp_path_factory):
  if request.param == "s3":
    yield request.getfixturevalue("s3")
    return
  with _serve(request.param, tmp_path_factory) as url:
    yield url


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("local") / "run"
  train_on(corpus, tiny(), workdir)
  return workdir


@pytest.fixture(scope="module")
def run(s3, corpus):
  workdir = files.as_path(f"{s3}/run")
  train_on(corpus, tiny(), workdir)
  return workdir


def _assert_same_weights(one, other):
  one, other = (jax.device_get(weights_of(load_trained(x).model)) for x in (one, other))
  assert one.keys() == other.keys()
  for name in one:
    np.testing.assert_array_equal(one[name], other[name], strict=True)


def _copy(folder, target):
  for path in folder.objects():
    (target / str(path).removeprefix(f"{folder}/")).write_bytes(path.read_bytes())
  return target


class Killed(BaseException):
  pass


def _kill():
  raise Killed


def test_paths(bucket):
  folder = files.as_path(f"{bucket}/paths/a")
  assert str(folder / "b") == f"{bucket}/paths/a/b" and not folder.exists()
  (folder / "b/c").write_text("text")
  files.write_json(folder / "d", dict(x=1))
  assert [p.name for p in folder.iterdir()] == ["b", "d"]
  assert folder.is_dir() and (folder / "b").is_dir() and not (folder / "b").is_file()
  assert (folder / "b/c").read_text() == "text" and (folder / "b/c").is_file()
  (folder / "b").rename(folder / "e")
  assert [str(p) for p in files.all_files(folder)] == [str(folder / "d"), str(folder / "e/c")]
  files.check_writable(folder)
  files.remove_tree(folder)
  assert not folder.exists()
  with pytest.raises(FileNotFoundError):
    (folder / "d").read_bytes()
  with pytest.raises(OSError, match="a local file is needed"):
    os.stat(folder / "d")
  with pytest.raises(OSError, match=r"nobucket/x cannot be listed \(.*\): check the bucket"):
    files.as_path(f"{bucket.replace('bucket', 'nobucket')}/x").exists()


def test_corpus(bucket, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("one two three\n" * 200)
  make = lambda **options: prepare(text, f"{bucket}/corpus", load_tokenizer("bytes"), **options)
  made = make(validation=0.1)
  assert make(validation=0.1) == made  # verifies it
  opened = open_corpus(f"{bucket}/corpus")
  assert opened.manifest == made and opened.train.folder.name == "corpus"
  with pytest.raises(ValueError, match="prepared with other settings"):
    make(validation=0.2)
  (files.as_path(f"{bucket}/corpus") / "manifest.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"has no manifest.json"):
    open_corpus(f"{bucket}/corpus")
  with pytest.raises(ValueError, match="has unrelated files"):
    make(validation=0.1)


def test_text_on_object_storage_is_rejected():
  with pytest.raises(ValueError, match=r"^s3://b/x is on object storage, but text input must be l"):
    prepare("s3://b/x", "out", load_tokenizer("bytes"))


def test_resume_is_bitwise_identical(bucket, corpus, uninterrupted, monkeypatch):
  workdir = files.as_path(f"{bucket}/killed")
  with monkeypatch.context() as patch:
    stop_at(patch, 6, _kill)
    with pytest.raises(Killed):
      train_on(corpus, tiny(), workdir)
  assert saved_steps(workdir) == [4]
  (workdir / "checkpoints/6/weights/x/0").write_bytes(b"of an interrupted save")
  train_on(corpus, tiny(), workdir)
  assert saved_steps(workdir) == saved_steps(uninterrupted) == [8, 12]
  assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["12", "8"]
  assert numbers(workdir) == numbers(uninterrupted)
  _assert_same_weights(workdir, uninterrupted)
  assert not (workdir / "lease").exists() and (workdir / "tensorboard").is_dir()


@pytest.mark.parametrize("how", ["deleted", "truncated", "flipped"])
def test_resume_skips_a_damaged_checkpoint(run, s3, corpus, uninterrupted, how):
  workdir = _copy(run, files.as_path(f"{s3}/{how}"))
  chunk = workdir / "checkpoints/12/weights/embedding/0.0"
  content = bytearray(chunk.read_bytes())
  content[100] ^= 1
  chunk.unlink()
  if how != "deleted":
    chunk.write_bytes(content[:50] if how == "truncated" else content)
  reports = []
  train_on(corpus, tiny(), workdir, report=reports.append)
  assert reports[0].startswith("checkpoint 12 is damaged (") and "step 8 of 12" in reports[1]
  assert (workdir / "damaged/12/meta/metadata").is_file() and saved_steps(workdir) == [8, 12]
  _assert_same_weights(workdir, uninterrupted)


def test_runs_can_be_copied_in_both_directions(run, s3, corpus, uninterrupted, tmp_path):
  local = object_storage.download(run, tmp_path / "run")
  object_storage.upload(uninterrupted, files.as_path(f"{s3}/copied"), last="config.json")
  for workdir in (local, files.as_path(f"{s3}/copied")):
    _assert_same_weights(workdir, uninterrupted)
    reports = []
    train_on(corpus, tiny(tokens=14 * 256), workdir, extend=True, report=reports.append)
    assert reports[0] == "resuming from step 12 of 14" and saved_steps(workdir)[-1] == 14
  _assert_same_weights(local, f"{s3}/copied")


def test_exports(run, s3, uninterrupted):
  trained = load_trained(run)
  save_weights(trained, f"{s3}/export")
  _assert_same_weights(f"{s3}/export", uninterrupted)
  with pytest.raises(ValueError, match="s3://bucket/export is not empty"):
    save_weights(trained, f"{s3}/export")
  save_fla(trained.model, f"{s3}/public")
  assert weights_of(load_fla(f"{s3}/public")).keys() == weights_of(trained.model).keys()
  initial = [InitFrom(f"{s3}/{name}").origin() for name in ("run", "export", "public")]
  assert [x["kind"] for x in initial] == ["run", "export", "public"]
  assert len({x["sha256"] for x in initial}) == 1


def test_an_interrupted_export_is_absent(run, s3, monkeypatch):
  write = object_storage.ObjectPath.write_bytes

  def fail(path, data):
    if path.name == "config.json":
      raise OSError("no connection")
    return write(path, data)

  monkeypatch.setattr(object_storage.ObjectPath, "write_bytes", fail)
  with pytest.raises(OSError, match="no connection"):
    save_weights(load_trained(run), f"{s3}/interrupted")
  assert not files.as_path(f"{s3}/interrupted").exists()


def test_profile_needs_a_local_workdir(s3, corpus):
  with pytest.raises(ValueError, match="a profile needs a local workdir"):
    train_on(corpus, tiny(), f"{s3}/profile", profile=True)


def test_lease(s3, monkeypatch):
  monkeypatch.setattr(object_storage, "_RENEW", 0.2)
  monkeypatch.setattr(object_storage, "_EXPIRE", 1.5)
  lock = files.as_path(f"{s3}/locked/lock")
  path = lock.with_name("lease")
  reports = []
  with (
    files.locked(lock),
    pytest.raises(files.LockedError, match=r"^s3://bucket/locked is in use by process"),
    files.locked(lock, report=reports.append),
  ):
    pass
  assert "waiting up to" in reports[0] and not path.exists()
  path.write_text("process 1 on another machine\n")  # killed: nothing renews it
  with files.locked(lock, report=reports.append):
    assert path.read_text().startswith(f"process {os.getpid()} on ")
  process = launch(["-c", "import os, socket; print(os.getpid(), 'on', socket.gethostname())"])
  path.write_text(f"process {wait_for_exit(process)}")
  with files.locked(lock, report=pytest.fail):  # that process has ended: no need to wait
    pass
  assert not path.exists()


def test_the_local_copy_of_a_corpus_is_verified(s3, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("one two three\n" * 50)
  prepare(text, f"{s3}/again", load_tokenizer("bytes"), validation=0.1)
  first = open_corpus(f"{s3}/again").train.folder
  shutil.rmtree(first)
  assert open_corpus(f"{s3}/again").train.folder == first and first.is_dir()
  shutil.rmtree(first)
  shard = files.as_path(f"{s3}/again/train-00000.bin")
  shard.write_bytes(bytes(len(shard.read_bytes())))
  with pytest.raises(
    ValueError, match=r"^s3://bucket/again has a file that does not match its man"
  ):
    open_corpus(f"{s3}/again")


@pytest.mark.slow
def test_two_processes_write_their_shards(s3, corpus, uninterrupted):
  workdir = files.as_path(f"{s3}/two")
  split = ["--processes=2", "--config.mesh.data=1", "--config.mesh.fsdp=2", free_address()]
  words = train_words(corpus, workdir, *split)
  for process in [launch([*words, f"--rank={rank}"]) for rank in range(2)]:
    wait_for_exit(process)
  assert saved_steps(workdir) == [8, 12]
  assert (workdir / "checkpoints/12/weights/embedding/0.1").is_file()  # of the second process
  reports = []  # one process reads all shards
  train_on(corpus, tiny(tokens=14 * 256), workdir, extend=True, report=reports.append)
  assert reports[0] == "resuming from step 12 of 14" and saved_steps(workdir) == [12, 14]
