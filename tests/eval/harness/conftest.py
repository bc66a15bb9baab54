import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.models import build, preset


@pytest.fixture(scope="package", autouse=True)
def as_users_run():
  """No 64 bits and no strict types: libraries around the harness do not know them."""
  with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="package")
def model():
  """Layers with a state of one size and one with a cache, of bytes; sharper than at first."""
  mixers = dict(
    deltanet=DeltaNetConfig(key_size=16, value_size=16, chunk=16),
    window=AttentionConfig(head_size=16, window=12),
  )
  options = dict(vocab=260, width=32, depth=2, mlp_multiple=32, init_std=0.2)
  return build(preset("deltanet-tiny", **options, mixers=mixers, pattern=("deltanet", "window")))


@pytest.fixture(scope="package")
def direct(model):
  """(log p, greedy) of a continuation by one forward pass over all tokens at once."""
  forward = jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens)[0]))

  def score(context, continuation, max_length):
    tokens = np.asarray([*context, *continuation], np.int32)[-(max_length + 1) :]
    # Padded at the end, where it changes nothing before: few programs.
    padded = np.zeros((1, max_length), np.int32)
    padded[0, : len(tokens) - 1] = tokens[:-1]
    n = len(continuation)
    found = np.asarray(forward(jnp.asarray(padded)), np.float64)[len(tokens) - 1 - n :][:n]
    right = found[np.arange(n), tokens[-n:]]
    return right.sum(), bool((found.argmax(axis=-1) == tokens[-n:]).all())

  return score
