"""Chunkwise form of the DPLR recurrence, with a backward pass that recomputes the states.

This file orders the computation; `chunk.py` computes one chunk. Batch and heads are one axis of
"sequences". A block is a few chunks of a few sequences, processed at a time, so that no
intermediate has the sequence length. Residuals are X, R and the states between blocks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.dplr import chunk as one_chunk
from deltanet_jax.ops.dplr.chunk import Inputs
from deltanet_jax.ops.dtypes import matmul_precision_for
from deltanet_jax.ops.triangular import unit_lower_inverse

# Tokens (and on a CPU sequences) times head size of a block: the intermediates stay in the cache.
# Elsewhere all sequences are one group.
_BLOCK = 2**12
_GROUP = 2**7


class _Sizes(NamedTuple):
  """Groups of G sequences, each of n blocks of M chunks of C tokens."""

  G: int
  n: int
  M: int
  C: int


def _sizes(N, L, size, chunk):
  C = min(chunk, 1 << (L - 1).bit_length())
  total = -(-L // C)
  n = -(-total // max(_BLOCK // size // C, 1))
  most = max(_GROUP // size, 1) if target_platform() == "cpu" else N
  G = max(i for i in range(1, N + 1) if N % i == 0 and i <= most)
  return _Sizes(G, n, -(-total // n), C)


def chunkwise(q, k, v, a, b, g, S0, segments, *, scale, chunk):
  """Return (o, S) of the DPLR recurrence, `[B L H ·]`; a must be zero where a segment starts.

  Args:
    segments: `[B L]` segment numbers from `number_segments`, or None.
  """
  B, L, H, dk = q.shape
  sizes = _sizes(B * H, L, max(dk, v.shape[3]), chunk)
  carried_segment = None
  if segments is not None:
    # A chunk starts from the state of the previous token's segment; S0 belongs to the first.
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    segments, carried_segment = (
      jnp.broadcast_to(x[:, :, None], (B, L, H)) for x in (segments, before)
    )
    segments = _split(segments, sizes, mode="edge")
    carried_segment = _split(carried_segment, sizes, mode="edge")[..., 0]
  parts = (None if x is None else _split(x, sizes) for x in (q, k, v, a, b, g))
  S0 = S0.reshape(-1, sizes.G, *S0.shape[2:])
  o, S = _chunkwise(Inputs(*parts, segments, carried_segment), S0, scale)
  o = jnp.moveaxis(o, 3, 1).reshape(B, H, -1, o.shape[-1])[:, :, :L]
  return jnp.moveaxis(o, 1, 2), S.reshape(B, H, *S.shape[2:])


def _split(x, sizes, mode="constant"):
  """[B L H ·] to [groups n M G C ·]; padded tokens are zero and do not change the state."""
  G, n, M, C = sizes
  pad = n * M * C - x.shape[1]
  x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2), mode=mode)
  x = jnp.moveaxis(x, 2, 1).reshape(-1, G, n, M, C, *x.shape[3:])
  return jnp.moveaxis(x, 1, 3)


@functools.partial(jax.custom_vjp, nondiff_argnames=("scale",))
def _chunkwise(inputs, S0, scale):
  return _forward(inputs, S0, scale)[0]


def _forward(inputs, S0, scale):
  """Return (o, S) and the residuals: inputs, X, R and the states between blocks."""

  def one_block(S, x):
    x = _upcast(x, scale, S.dtype)
    decay, G = _over_chunks(_intra)(x)
    X = unit_lower_inverse(_over_chunks(one_chunk.lower_triangle)(G))
    rows = _over_chunks(one_chunk.before_scan)(x, decay, G, X)
    S_next, (QS, R) = _scan_chunks(one_chunk.output, S, (x, decay, rows))
    O = _over_chunks(one_chunk.after_scan)(x, G, QS, R)
    return S_next, (O.astype(inputs.v.dtype), (X, S, R))

  def one_group(group):
    inputs, S0 = group
    S, (o, saved) = lax.scan(one_block, S0, inputs)
    return o, S, saved

  with matmul_precision_for(inputs.v.dtype):
    o, S, saved = lax.map(one_group, (inputs, S0))
  return (o, S), (inputs, saved)


def _backward(scale, residuals, cotangents):
  """Return the gradients of all inputs, block by block in reverse; recomputes inner states."""
  inputs, saved = residuals
  do, dS_last = cotangents

  def one_block(dS, xs):
    given, (X, S, R), dO = xs
    x, dO = _upcast(given, scale, S.dtype), dO.astype(S.dtype)
    decay, G = _over_chunks(_intra)(x)
    from_output = _over_chunks(one_chunk.from_output)(x, decay, G, dO)
    _, S = _scan_chunks(one_chunk.state, S, (x, decay, R))
    dS, dstates = _scan_chunks(one_chunk.dstate, dS, (x, decay, X, from_output), reverse=True)
    dq, *rest = _over_chunks(one_chunk.gradients)(x, decay, G, S, R, dO, *dstates)
    grads = jax.tree.map(lambda d, x: d.astype(x.dtype), (dq * scale, *rest), tuple(given[:6]))
    return dS, grads

  def one_group(group):
    inputs, saved, do, dS = group
    return lax.scan(one_block, dS, (inputs, saved, do), reverse=True)

  # Set here too: the backward pass is traced after the forward's context has ended.
  with matmul_precision_for(inputs.v.dtype):
    dS0, grads = lax.map(one_group, (inputs, saved, do, dS_last))
  return Inputs(*grads, segments=None, carried_segment=None), dS0


_chunkwise.defvjp(_forward, _backward)


def _intra(x):
  decay = one_chunk.chunk_decay(x)
  return decay, one_chunk.scores(x, decay)


def _upcast(x, scale, dtype):
  """Cast a block of inputs to the state's dtype and scale the queries."""
  parts = (None if y is None else y.astype(dtype) for y in x[:6])
  x = Inputs(*parts, *x[6:])
  return x._replace(q=x.q * scale)


def _over_chunks(f):
  """Map f over every chunk of every sequence, arrays [M G ·]."""

  def mapped(*args):
    lead = jax.tree.leaves(args)[0].shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), args)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), jax.vmap(f)(*flat))

  return mapped


def _scan_chunks(f, carry, xs, reverse=False):
  """Scan f(carry, x) over chunks, all sequences of the group at once."""
  return lax.scan(jax.vmap(f), carry, xs, reverse=reverse)
