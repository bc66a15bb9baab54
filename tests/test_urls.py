"""Every function that takes a path rejects an unsupported URL, and creates no folder `gs:`."""

import pathlib

import pytest

from deltanet_jax import files
from deltanet_jax.config import TrainConfig
from deltanet_jax.data import (
  Task,
  find_tokenizer,
  load_tokenizer,
  open_corpus,
  shipped_corpus,
)
from deltanet_jax.data.corpus.prepare import prepare
from deltanet_jax.data.corpus.text import find_sources
from deltanet_jax.interop import checkpoint_folder, load_fla, save_fla
from deltanet_jax.models import build, preset
from deltanet_jax.train import InitFrom, check_start, load_trained, save_weights, train

URL = "ftp://bucket/folder"
_BYTES = load_tokenizer("bytes")

CALLS = {
  "check_writable": files.check_writable,
  "check_start": lambda url: check_start(_config(), url),
  "train": lambda url: train(_config(), url, _Task()),
  "init_from": InitFrom,
  "load_trained": load_trained,
  "save_weights": lambda url: save_weights(_model(), url),
  "load_fla": load_fla,
  "save_fla": lambda url: save_fla(_model(), url),
  "checkpoint_folder": checkpoint_folder,
  "load_tokenizer": load_tokenizer,
  "find_tokenizer": find_tokenizer,
  "open_corpus": open_corpus,
  "find_sources": find_sources,
  "find_several_sources": lambda url: find_sources([shipped_corpus(), url]),
  "prepare_input": lambda url: prepare(url, "out", _BYTES),
  "prepare_output": lambda url: prepare(shipped_corpus(), url, _BYTES),
}


class _Task(Task):
  batch = identity = describe = None


def _model():
  return build(preset("deltanet-tiny", vocab=64))


def _config():
  return TrainConfig(model=preset("deltanet-tiny", vocab=64))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("url", [URL, pathlib.Path(URL)], ids=["str", "Path"])
def test_an_unsupported_url_is_rejected_and_nothing_is_written(call, url, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match=r"^ftp:/+bucket/folder.* is a URL, and ftp:// is not supp"):
    call(url)
  assert not list(tmp_path.iterdir())
