import json

import numpy as np
import pytest

from deltanet_jax.data import load_tokenizer, open_corpus
from deltanet_jax.data.corpus.prepare import prepare


def make_texts(count: int, seed: int) -> list[str]:
  """Return texts of 1 to 60 characters, some of two bytes, and one far longer than a sequence."""
  random = np.random.default_rng(seed)
  alphabet = np.array(list("abcdefgh é\n"))
  sizes = random.integers(1, 60, count)
  sizes[count // 2] = 700
  return ["x" + "".join(random.choice(alphabet, size)) for size in sizes]


def write_jsonl(path, texts):
  path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="package")
def texts():
  return make_texts(80, seed=1)


@pytest.fixture(scope="package")
def source(texts, tmp_path_factory):
  """Three JSON lines files, with empty documents in between."""
  folder = tmp_path_factory.mktemp("source")
  for i in range(3):
    write_jsonl(folder / f"{i}.jsonl", ["", *texts[i::3], " \n"])
  return folder


@pytest.fixture(scope="package")
def corpus(source, tmp_path_factory):
  """Byte tokens in many small shards, so that sequences cross shard boundaries."""
  folder = tmp_path_factory.mktemp("corpus") / "bytes"
  prepare(source, folder, load_tokenizer("bytes"), validation=0.2, shard_tokens=300)
  return open_corpus(folder)
