"""Runs, corpora and exports on object storage, against a local S3 server (moto)."""

import jax
import numpy as np
import pytest

from deltanet_jax import files
from deltanet_jax.data import load_tokenizer, open_corpus
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.train import load_trained, save_weights
from deltanet_jax.train.checkpoint_reader import saved_steps
from tests.support import object_servers
from tests.support.training import numbers, stop_at, tiny, train_on


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
  """URL of an empty bucket, with the cache folder of the user in a temporary folder."""
  if reason := object_servers.missing():
    pytest.skip(reason)
  folder = tmp_path_factory.mktemp("s3")
  with object_servers.s3_server(folder / "log") as env, pytest.MonkeyPatch.context() as patch:
    for name, value in (env | {"XDG_CACHE_HOME": str(folder / "cache")}).items():
      patch.setenv(name, value)
    yield "s3://bucket"


def test_paths(bucket):
  folder = files.as_path(f"{bucket}/paths/a")
  assert str(folder / "b") == "s3://bucket/paths/a/b" and not folder.exists()
  (folder / "b/c").write_text("text")
  files.write_json(folder / "d", dict(x=1))
  assert [p.name for p in folder.iterdir()] == ["b", "d"]
  assert folder.is_dir() and (folder / "b").is_dir() and not (folder / "b").is_file()
  assert (folder / "b/c").read_text() == "text" and (folder / "b/c").is_file()
  (folder / "b").rename(folder / "e")
  assert [str(p) for p in files.all_files(folder)] == [str(folder / "d"), str(folder / "e/c")]
  files.remove_tree(folder)
  assert not folder.exists()
  with pytest.raises(FileNotFoundError):
    (folder / "d").read_bytes()
  with pytest.raises(OSError, match="a local file is needed"):
    open(folder / "d")


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("local") / "run"
  train_on(corpus, tiny(), workdir)
  return workdir


def _weights(workdir):
  from deltanet_jax.models.abstract import weights_of

  return jax.device_get(weights_of(load_trained(workdir).model))


def _assert_same_weights(one, other):
  one, other = _weights(one), _weights(other)
  assert one.keys() == other.keys()
  for name in one:
    np.testing.assert_array_equal(one[name], other[name], strict=True)


class Killed(BaseException):
  pass


def _kill():
  raise Killed


def test_corpus(bucket, corpus, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("one two three\n" * 200)
  made = prepare(text, f"{bucket}/corpus", load_tokenizer("bytes"), validation=0.1)
  again = prepare(text, f"{bucket}/corpus", load_tokenizer("bytes"), validation=0.1)
  assert made == again
  opened = open_corpus(f"{bucket}/corpus")
  assert opened.manifest == made and opened.train.folder.name == "corpus"
  with pytest.raises(ValueError, match="prepared with other settings"):
    prepare(text, f"{bucket}/corpus", load_tokenizer("bytes"), validation=0.2)


def test_resume_is_bitwise_identical(bucket, corpus, uninterrupted, monkeypatch, tmp_path):
  workdir = files.as_path(f"{bucket}/run")
  with monkeypatch.context() as patch:
    stop_at(patch, 6, _kill)
    with pytest.raises(Killed):
      train_on(corpus, tiny(), workdir)
  assert saved_steps(workdir) == [4]
  train_on(corpus, tiny(), workdir)
  assert saved_steps(workdir) == saved_steps(uninterrupted) == [8, 12]
  assert numbers(workdir) == numbers(uninterrupted)
  _assert_same_weights(workdir, uninterrupted)
  assert not (workdir / "lock").exists()
  save_weights(load_trained(workdir), f"{bucket}/export")
  _assert_same_weights(f"{bucket}/export", uninterrupted)
