import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.mixers.attention import AttentionConfig
from deltanet_jax.mixers.deltanet import DeltaNetConfig
from deltanet_jax.models import build, preset


@pytest.fixture(scope="package", autouse=True)
def as_users_run():
  """Default JAX settings: libraries of the harness do not support x64 and strict promotion."""
  with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="package")
def model():
  """Byte model with a recurrent-state layer and a KV-cache layer; large init for sharp logits."""
  mixers = dict(
    deltanet=DeltaNetConfig(key_size=16, value_size=16, chunk=16),
    window=AttentionConfig(head_size=16, window=12),
  )
  options = dict(vocab=260, width=32, depth=2, mlp_multiple=32, init_std=0.2)
  return build(preset("deltanet-tiny", **options, mixers=mixers, pattern=("deltanet", "window")))


@pytest.fixture(scope="package")
def direct(model):
  """Return a function: (log p, greedy) of a continuation by one forward pass."""
  forward = jax.jit(lambda tokens: jax.nn.log_softmax(model(tokens)[0]))

  def score(context, continuation, max_length):
    tokens = np.asarray([*context, *continuation], np.int32)[-(max_length + 1) :]
    # Padded on the right, so that few lengths are compiled.
    padded = np.zeros((1, max_length), np.int32)
    padded[0, : len(tokens) - 1] = tokens[:-1]
    n = len(continuation)
    found = np.asarray(forward(jnp.asarray(padded)), np.float64)[len(tokens) - 1 - n :][:n]
    right = found[np.arange(n), tokens[-n:]]
    return right.sum(), bool((found.argmax(axis=-1) == tokens[-n:]).all())

  return score
