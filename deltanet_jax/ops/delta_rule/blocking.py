"""Cutting the delta rule's inputs into blocks of chunks, and putting results back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.nonfinite import zero_nonfinite, zero_nonfinite_gate

# Tokens times head size that are worked on together: 256 tokens of size 64. The intermediates of
# one block stay in the CPU's cache, and none of them ever has the length of the sequence. A decay
# per key channel has intermediates of the keys' size besides. Measurements: BUILD_NOTES.md.
_BLOCK = 2**14
_BLOCK_VECTOR = 2**13
# Heads (of all rows) times head size that are worked on together on a CPU, for the same reason:
# 4 heads of size 64. Groups follow one another, so that a token of a head costs the same however
# many rows and heads there are. Elsewhere all of them are one group.
_GROUP = 2**8


class Inputs(NamedTuple):
  """Whole sequences `[B L H ·]`, or one chunk of one head `[C ·]`.

  `carried_document`, the number of the segment that a chunk's first state is of, is per chunk.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  beta: jax.Array
  g: jax.Array | None
  segments: jax.Array | None
  carried_document: jax.Array | None


class Sizes(NamedTuple):
  """What is worked on together: `chunks` of C tokens, of `heads` key heads in `rows` rows."""

  C: int
  chunks: int
  rows: int
  heads: int


def sizes_for(q, v, g, chunk) -> Sizes:
  """Sizes for whole inputs `[B L H ·]`; `chunk` is the largest C, None the fastest on a CPU."""
  B, L, H, dk = q.shape
  size, repeats = max(dk, v.shape[3]), v.shape[2] // H
  C = min(chunk or (32 if size <= 128 else 64), 1 << (L - 1).bit_length())
  tokens = (_BLOCK if g is None or g.ndim == 3 else _BLOCK_VECTOR) // size
  total = -(-L // C)
  chunks = -(-total // -(-total // max(tokens // C, 1)))
  if target_platform() != "cpu":
    return Sizes(C, chunks, B, H)
  divisor = lambda n, most: max(i for i in range(1, n + 1) if n % i == 0 and i <= max(most, 1))
  most = _GROUP // (size * repeats)
  heads = divisor(H, most)
  return Sizes(C, chunks, divisor(B, most // heads), heads)


class BlockIndexer:
  """Where the blocks of whole inputs lie; `numbers` has one (row, token, head) for each.

  The blocks of one group of rows and heads follow one another, since they pass on a state.
  """

  def __init__(self, inputs: Inputs, sizes: Sizes):
    B, L, self.key_heads, _ = inputs.q.shape
    self.sizes = sizes
    self.tokens = sizes.C * sizes.chunks
    counts = B // sizes.rows, self.key_heads // sizes.heads, L // self.tokens
    row, head, token = np.unravel_index(np.arange(np.prod(counts)), counts)
    self.numbers = jnp.asarray(np.stack([row, token, head], axis=1))
    self.last_token = counts[2] - 1

  def _heads(self, heads):
    """How many of an array's heads belong to one block."""
    return self.sizes.heads * heads // self.key_heads

  def take(self, x, place):
    """One block of `[B L H ·]`."""
    return _take(x, place, (self.sizes.rows, self.tokens, self._heads(x.shape[2])))

  def take_state(self, S, place):
    """The states of one block's rows and heads, of `[B H dk dv]`."""
    return _take(S, place[::2], (self.sizes.rows, self._heads(S.shape[1])))

  def put_state(self, whole, S, place):
    return _put(whole, S, place[::2])

  def chunks(self, x, place, heads, dtype):
    """One block of `[B L H ·]` as chunks [M B heads C ·], heads repeated to make up `heads`."""
    return _split_heads(self.take(x, place), self.sizes.C, heads, dtype)

  def put(self, whole, block, place):
    """Puts chunks [M B heads C ·] back into `[B L H ·]`, summing repeated heads."""
    M, B, heads, C = block.shape[:4]
    H = self._heads(whole.shape[2])
    if heads != H:
      block = block.reshape(M, B, H, heads // H, *block.shape[3:]).sum(axis=3)
    block = jnp.moveaxis(block, (0, 2), (1, 3)).reshape(B, M * C, H, *whole.shape[3:])
    return _put(whole, block, place)

  def inputs(self, inputs: Inputs, place, scale, dtype) -> Inputs:
    """One block of the inputs as chunks, [M B H C ·]."""
    heads = self._heads(inputs.v.shape[2])
    q, k, v, beta, g = jax.tree.map(
      lambda x: self.chunks(x, place, heads, dtype), tuple(inputs[:5])
    )
    k, v, beta = zero_nonfinite(k), zero_nonfinite(v), zero_nonfinite(beta)
    segments, carried_document = inputs.segments, inputs.carried_document
    if segments is not None:
      of_rows = lambda x, tokens: _take(x, place[:2], (self.sizes.rows, tokens))[:, :, None]
      segments = of_rows(segments, self.tokens)
      segments = _split_heads(segments, self.sizes.C, heads, segments.dtype)
      carried_document = of_rows(carried_document, self.sizes.chunks)
      carried_document = _split_heads(carried_document, 1, heads, segments.dtype)[..., 0]
    return Inputs(q * scale, k, v, beta, zero_nonfinite_gate(g), segments, carried_document)


def _take(x, place, size):
  starts = [place[i] * n for i, n in enumerate(size)] + [0] * (x.ndim - len(size))
  return lax.dynamic_slice(x, starts, (*size, *x.shape[len(size) :]))


def _put(whole, part, place):
  n = place.shape[0]
  starts = [place[i] * part.shape[i] for i in range(n)] + [0] * (whole.ndim - n)
  return lax.dynamic_update_slice(whole, part.astype(whole.dtype), starts)


def _split_heads(x, C, heads, dtype):
  """[B T H ·] to [T/C B heads C ·], each head repeated to make up `heads`."""
  B, T, H = x.shape[:3]
  x = jnp.moveaxis(x.reshape(B, T // C, C, *x.shape[2:]), (1, 3), (0, 2)).astype(dtype)
  return x if heads == H else jnp.repeat(x, heads // H, axis=2)
