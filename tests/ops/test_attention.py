"""Softmax attention, on sequences and cached, against a float64 NumPy loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanet_jax.ops import cached_attention, causal_attention, init_cache
from deltanet_jax.ops.attention import xla
from deltanet_jax.ops.testing import rel_rms

B, L, H, Hk, d = 2, 11, 4, 2, 4
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, L, heads, d)) for heads in (H, Hk, Hk))
IDS = np.array([[4, 4, 4, 7, 4, 4, 4, 4, 4, 2, 0], [1] * 11], np.int32)
# One key, windows that do and do not divide the length, around the length, and beyond it.
WINDOWS = [None, 1, 2, 3, 5, 6, L - 1, L, 2 * L]


attend = jax.jit(causal_attention, static_argnames=("window", "implementation"))
attend_cached = jax.jit(cached_attention, static_argnames="window")


def numpy_attention(q, k, v, window, ids):
  o = np.zeros_like(q)
  for b in range(q.shape[0]):
    first = 0
    for t in range(q.shape[1]):
      if ids is not None and t and ids[b, t] != ids[b, t - 1]:
        first = t
      visible = slice(max(first, 0 if window is None else t - window + 1), t + 1)
      for h in range(H):
        j = h // (H // Hk)
        p = np.exp(k[b, visible, j] @ q[b, t, h] / np.sqrt(d))
        o[b, t, h] = p @ v[b, visible, j] / p.sum()
  return o


def arrays(dtype="float64"):
  return tuple(jnp.asarray(x, dtype) for x in (Q, K, V))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_sequences(window, packed):
  ids = IDS if packed else None
  options = dict(window=window, segment_ids=jnp.asarray(IDS) if packed else None)
  want = numpy_attention(Q, K, V, window, ids)
  assert rel_rms(attend(*arrays(), **options), want) < 1e-14
  # The path of `jax.nn.dot_product_attention`, with its own causal mask and window.
  assert rel_rms(attend(*arrays("float32"), **options), want) < 1e-6
  half = attend(*arrays("bfloat16"), **options)
  assert half.dtype == jnp.bfloat16 and rel_rms(half, want) < 8e-3


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_of_both_paths_agree(window):
  def grads(dtype, implementation):
    f = lambda *x: causal_attention(
      *x, window=window, segment_ids=jnp.asarray(IDS), implementation=implementation
    )
    o, pull = jax.vjp(f, *arrays(dtype))
    return pull(jnp.cos(o))

  grads = jax.jit(grads, static_argnums=(0, 1))
  for got, want in zip(grads("float32", "xla"), grads("float64", "plain"), strict=True):
    assert rel_rms(got, want) < 1e-5


# 11 tokens are six blocks, the last one half full, in three groups; or eleven blocks in six groups.
@pytest.mark.parametrize("block, groups", [(2, 4), (1, 6)])
@pytest.mark.parametrize(
  "packed,window", [(False, None), (True, None), (True, 7), (True, 3), (False, 5)]
)
def test_queries_in_blocks(monkeypatch, packed, window, block, groups):
  options = dict(window=window, segment_ids=jnp.asarray(IDS) if packed else None)

  def value_and_gradients(dtype="float64"):
    o, pull = jax.vjp(lambda *x: causal_attention(*x, **options), *arrays(dtype))
    return o, *pull(jnp.cos(o))

  want = jax.jit(value_and_gradients)()
  monkeypatch.setattr(xla, "_BLOCK", block)
  monkeypatch.setattr(xla, "_GROUPS", groups)
  jax.clear_caches()  # operators are traced once per shapes
  program = jax.jit(lambda: value_and_gradients())
  assert "scan" in str(jax.make_jaxpr(program)())
  for got, wanted in zip(program(), want, strict=True):
    assert rel_rms(got, wanted) < 1e-13
  for got, wanted in zip(jax.jit(lambda: value_and_gradients("float32"))(), want, strict=True):
    assert rel_rms(got, wanted) < 1e-5


# The cache has the size of the window or the sequence; pieces of one token and of more than M.
@pytest.mark.parametrize("window,size", [(None, L), (3, 3), (3, 7), (5, 5), (1, 1)])
@pytest.mark.parametrize("pieces", [(1,) * L, (4, 1, 6), (10, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_cache_continues(packed, pieces, window, size):
  cache = init_cache(B, size, Hk, d, "float64")
  got, end = [], 0
  for n in pieces:
    piece = slice(end, end := end + n)
    # Segments start inside a piece; the first segment of a piece continues the cached one.
    ids = jnp.asarray(IDS[:, piece]) if packed else None
    now = (jnp.asarray(x[:, piece]) for x in (Q, K, V))
    o, cache = attend_cached(*now, cache, window=window, segment_ids=ids)
    got.append(o)
  ids = None
  if packed:
    new = np.concatenate([np.zeros((B, 1), bool), IDS[:, 1:] != IDS[:, :-1]], axis=1)
    new[:, np.cumsum(pieces)[:-1]] = False
    ids = np.cumsum(new, axis=1)
  assert rel_rms(np.concatenate(got, axis=1), numpy_attention(Q, K, V, window, ids)) < 1e-14
  assert cache.index == L


def test_wrong_windows_are_clear_errors():
  with pytest.raises(ValueError, match="window is 0"):
    causal_attention(*arrays(), window=0)
  with pytest.raises(ValueError, match="window is 5, but the cache holds only 3"):
    cached_attention(*arrays(), init_cache(B, 3, Hk, d, "float64"), window=5)
