"""Blocking of the chunkwise delta rule: slices of inputs by block index, and their write-back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.nonfinite import zero_nonfinite, zero_nonfinite_gate

# Tokens times head size of a block: 256 tokens of size 64. The intermediates of one block stay in
# the CPU's cache, and none of them ever has the sequence length. A per-channel gate has additional
# intermediates of the keys' size. Measurements: BUILD_NOTES.md.
_BLOCK = 2**14
_BLOCK_VECTOR = 2**13
# Heads (of all sequences) times head size of a block on a CPU, for the same reason: 4 heads of size
# 64. Groups of heads are processed sequentially, so the cost per token and head does not depend on
# the batch size and the number of heads. Elsewhere all heads are one group.
_GROUP = 2**8


class Inputs(NamedTuple):
  """Full sequences `[B L H ·]`, or one chunk of one head `[C ·]`.

  `carried_segment`, the segment number of the state that a chunk starts from, is per chunk.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  beta: jax.Array
  g: jax.Array | None
  segments: jax.Array | None
  carried_segment: jax.Array | None


class Sizes(NamedTuple):
  """Size of a block: `chunks` of C tokens, of `heads` key heads in `sequences` sequences."""

  C: int
  chunks: int
  sequences: int
  heads: int


def sizes_for(q, v, g, chunk) -> Sizes:
  """Return the block size for inputs `[B L H ·]`.

  Args:
    chunk: Maximum C; None for the fastest on a CPU.
  """
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
  """Slices blocks out of full arrays and writes them back.

  `block_indices` has one (sequence, token, head) block index for each block. The blocks of one
  group of sequences and heads are consecutive, since each passes its state to the next.
  """

  def __init__(self, inputs: Inputs, sizes: Sizes):
    B, L, self.key_heads, _ = inputs.q.shape
    self.sizes = sizes
    self.tokens = sizes.C * sizes.chunks
    counts = B // sizes.sequences, self.key_heads // sizes.heads, L // self.tokens
    sequence, head, token = np.unravel_index(np.arange(np.prod(counts)), counts)
    self.block_indices = jnp.asarray(np.stack([sequence, token, head], axis=1))
    self.last_token_index = counts[2] - 1

  def _heads(self, heads):
    """Number of heads of a block, for an array with `heads` heads in total."""
    return self.sizes.heads * heads // self.key_heads

  def block(self, x, block_index):
    """Return one block of `[B L H ·]`."""
    size = (self.sizes.sequences, self.tokens, self._heads(x.shape[2]))
    return _slice(x, block_index, size)

  def state(self, S, block_index):
    """Return the states of one block's sequences and heads, from `[B H dk dv]`."""
    return _slice(S, block_index[::2], (self.sizes.sequences, self._heads(S.shape[1])))

  def update_state(self, full, S, block_index):
    """Write the states of one block into `[B H dk dv]`."""
    return _update(full, S, block_index[::2])

  def chunks(self, x, block_index, heads, dtype):
    """Return one block of `[B L H ·]` as chunks [M B heads C ·], heads repeated up to `heads`."""
    return _split_chunks(self.block(x, block_index), self.sizes.C, heads, dtype)

  def update(self, full, chunks, block_index):
    """Write chunks [M B heads C ·] into `[B L H ·]`, summing repeated heads."""
    M, B, heads, C = chunks.shape[:4]
    H = self._heads(full.shape[2])
    if heads != H:
      chunks = chunks.reshape(M, B, H, heads // H, *chunks.shape[3:]).sum(axis=3)
    block = jnp.moveaxis(chunks, (0, 2), (1, 3)).reshape(B, M * C, H, *full.shape[3:])
    return _update(full, block, block_index)

  def inputs(self, inputs: Inputs, block_index, scale, dtype) -> Inputs:
    """Return one block of the inputs as chunks [M B H C ·], non-finite values zeroed."""
    heads = self._heads(inputs.v.shape[2])
    q, k, v, beta, g = jax.tree.map(
      lambda x: self.chunks(x, block_index, heads, dtype), tuple(inputs[:5])
    )
    k, v, beta = zero_nonfinite(k), zero_nonfinite(v), zero_nonfinite(beta)
    segments, carried_segment = inputs.segments, inputs.carried_segment
    if segments is not None:
      size = self.sizes.sequences
      of_block = lambda x, tokens: _slice(x, block_index[:2], (size, tokens))[:, :, None]
      segments = of_block(segments, self.tokens)
      segments = _split_chunks(segments, self.sizes.C, heads, segments.dtype)
      carried_segment = of_block(carried_segment, self.sizes.chunks)
      carried_segment = _split_chunks(carried_segment, 1, heads, segments.dtype)[..., 0]
    return Inputs(q * scale, k, v, beta, zero_nonfinite_gate(g), segments, carried_segment)


def _slice(x, block_index, size):
  starts = [block_index[i] * n for i, n in enumerate(size)] + [0] * (x.ndim - len(size))
  return lax.dynamic_slice(x, starts, (*size, *x.shape[len(size) :]))


def _update(full, block, block_index):
  n = block_index.shape[0]
  starts = [block_index[i] * block.shape[i] for i in range(n)] + [0] * (full.ndim - n)
  return lax.dynamic_update_slice(full, block.astype(full.dtype), starts)


def _split_chunks(x, C, heads, dtype):
  """[B T H ·] to [T/C B heads C ·], each head repeated to make up `heads`."""
  B, T, H = x.shape[:3]
  x = jnp.moveaxis(x.reshape(B, T // C, C, *x.shape[2:]), (1, 3), (0, 2)).astype(dtype)
  return x if heads == H else jnp.repeat(x, heads // H, axis=2)
