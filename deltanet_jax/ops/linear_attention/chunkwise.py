"""Decayed linear attention in chunks: products inside, one state per chunk.

With b the log decay summed from the start of the chunk, a chunk that starts from S gives

  O = (Q e^b) S + (Q K^T * e^{b_i - b_j} * M) V,   S <- e^{b_C} S + (K e^{b_C - b})^T V.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltanet_jax.ops import decay as decays

# Tokens that are worked on together and recomputed together in the backward; fewer for a decay per
# key channel, whose scores are sixteen times as large.
_BLOCK_TOKENS = 512
_BLOCK_TOKENS_VECTOR = 128


def chunkwise(q, k, v, g, S0, run, *, chunk, exact):
  """(o, S) of linear attention, `[B L H ·]`, all with as many heads as v.

  Args:
    run: `[B L]` number of each token's document, ascending, or None.
    exact: whether float32 products must be (TPU, GPU); not so for values that came as bf16.
  """
  B, L = q.shape[:2]
  C = min(chunk, 1 << (L - 1).bit_length())
  vector = g is not None and g.ndim == 4
  chunks = -(-L // C)
  blocks = -(-chunks // max((_BLOCK_TOKENS_VECTOR if vector else _BLOCK_TOKENS) // C, 1))
  if vector:
    # XLA (CPU, jaxlib 0.10.2) inlines a loop of one turn, and the gradient of a vector decay in
    # float32 then crashes at run time: so two turns at least.
    blocks = max(blocks, 2)
  per_block = -(-chunks // blocks)
  pad = blocks * per_block * C - L
  carry_run = None
  if run is not None:
    run = jnp.pad(run, ((0, 0), (0, pad)), mode="edge")
    # A chunk starts from the state of the token before it, S0 belongs to the first document.
    carry_run = jnp.concatenate([run[:, :1], run[:, C - 1 : -1 : C]], axis=1)
    carry_run = jnp.moveaxis(carry_run.reshape(B, blocks, per_block), 0, 2)

  def split(x):
    """[B L ..] to [blocks, chunks of a block, B, C, ..]; padded tokens are zero, so g is 0."""
    if x.shape[1] == L:
      x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, blocks, per_block, C, *x.shape[2:]), 0, 2)

  @jax.checkpoint
  def one_block(S, xs):
    inputs = _over_chunks(_intra)(*xs)
    S, states = lax.scan(_next_state, S, inputs[2:])
    return S, _over_chunks(_output, heads=0)(*inputs[:2], states)

  inputs = jax.tree.map(split, (q, k, v, g, run))
  with jax.default_matmul_precision("highest" if exact else "default"):
    S, o = lax.scan(one_block, S0, (*inputs, carry_run))
  # [blocks chunks B H C dv] to [B L H dv]
  o = jnp.moveaxis(o, (2, 3), (0, 4)).reshape(B, L + pad, *o.shape[3:4], o.shape[-1])
  return o[:, :L], S


def _over_chunks(f, heads=None):
  """f of one chunk and head over [chunks B C H ·], documents without heads; gives [.. H C ·]."""
  inner = jax.vmap(f) if heads == 0 else jax.vmap(f, in_axes=(1, 1, 1, 1, None, None))
  return jax.vmap(jax.vmap(inner))


def _intra(Q, K, V, g, run, carry_run):
  """What does not need the state: rows that read it, their own output, and the state's change."""
  decay = decays.chunk_decay(g, run, carry_run, V.dtype)
  mask = jnp.asarray(np.tril(np.ones((K.shape[0],) * 2)), K.dtype)
  P = decays.scores(Q[None], K, decay, mask[None])[0]
  if decay is None:
    return Q, P @ V, jnp.ones((1, 1), V.dtype), K.T @ V
  return decay.into * Q, P @ V, decay.whole, (decay.out * K).T @ V


def _next_state(S, change):
  whole, written = change
  return whole * S + written, S


def _output(Q, O, S):
  return Q @ S + O
