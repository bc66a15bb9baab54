"""JAX settings and a corpus for all tests of training."""

import jax
import pytest

from deltanet_jax.data import load_tokenizer, open_corpus
from deltanet_jax.data.corpus.prepare import prepare


@pytest.fixture(scope="module", autouse=True)
def as_users_run(tmp_path_factory):
  """Default JAX settings, which optax needs, and a compilation cache for all tests."""
  changes = {
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "compiled"),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  before = {name: getattr(jax.config, name) for name in changes}
  for name, value in changes.items():
    jax.config.update(name, value)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  text = "\n".join(f'{{"text": "{i} and {i + 1} make {2 * i + 1}. "}}' for i in range(400))
  (folder / "sums.jsonl").write_text(text)
  prepare(folder / "sums.jsonl", folder / "out", load_tokenizer("bytes"), validation=0.1)
  return open_corpus(folder / "out")
