"""Chunkwise (WY/UT) form of the delta rule, with a backward pass that recomputes the states.

This file orders the computation. `chunk.py` computes one chunk, `blocking.py` slices the inputs.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.delta_rule import chunk as one_chunk
from deltanet_jax.ops.delta_rule.blocking import BlockIndexer, Inputs, sizes_for
from deltanet_jax.ops.delta_rule.chunk import Inverse
from deltanet_jax.ops.delta_rule.recurrent import recurrent
from deltanet_jax.ops.dispatch import forward_mode_unsupported, target_platform
from deltanet_jax.ops.dtypes import matmul_precision_for
from deltanet_jax.ops.nonfinite import has_nonfinite, nonfinite_reach, zero_nonfinite
from deltanet_jax.ops.triangular import unit_lower_inverse
from deltanet_jax.ops.vmap_as_batch import vmap_as_batch

Primal = Literal["chunks", "fastest"]

# With 1 - beta |k|^2 near -1 a repeated key reflects the state at every token, and the rounding
# error of K K^T, the same in every chunk, accumulates: 1e-4 after 4096 tokens. Above this threshold
# it is corrected, for float32 without a gate: coarser inputs are less exact anyway, and a decay
# forgets errors too. The branch is taken once per call: one per chunk costs a tenth of the time.
_REFLECTING = 1.98

# Bytes of all states up to which the token scan is faster than chunks where no gradient is taken,
# because its states stay in the cache: for head sizes up to 64, and from there to below 128. From
# 128 on, and with gates or segments, chunks are always faster. Measurements: BUILD_NOTES.md.
_SCANNED_SMALL, _SCANNED = 2**23, 2**18

_NO_FORWARD_MODE = forward_mode_unsupported("delta_rule", ("recurrent", "parallel"))


def chunkwise(q, k, v, beta, g, S0, segments, *, scale, chunk, primal: Primal = "chunks"):
  """Return (o, S) of the delta rule for `[B L H ·]`; q and k may have fewer heads than v.

  Args:
    segments: `[B L]` segment numbers from `number_segments`, or None.
    chunk: Maximum chunk size, a power of two, or None for the fastest on a CPU.
    primal: "fastest" lets a call that is not differentiated scan over tokens where that is faster
      on a CPU; "chunks" always computes in chunks.
  """
  if primal not in get_args(Primal):
    raise ValueError(f"primal is {primal!r}, expected 'chunks' or 'fastest'.")
  L, sizes = q.shape[1], sizes_for(q, v, g, chunk)
  scanned = L if primal == "fastest" and _scan_is_faster(g, S0, segments) else None
  C = sizes.C
  pad = -L % (sizes.chunks * C)
  if pad:
    # A padded token has beta = 0 and g = 0: it does not change the state.
    q, k, v, beta, g = jax.tree.map(lambda x: _pad(x, pad), (q, k, v, beta, g))
    segments = None if segments is None else _pad(segments, pad, mode="edge")
  carried_segment = None
  if segments is not None:
    # A chunk starts from the state of the previous token's segment; S0 belongs to the first.
    carried_segment = jnp.concatenate([segments[:, :1], segments[:, C - 1 : -1 : C]], axis=1)
  inputs = Inputs(q, k, v, beta, g, segments, carried_segment)
  o, S = _chunkwise(inputs, S0, scale, sizes, scanned)
  return (o[:, :L] if pad else o), S


def _pad(x, pad, **kwargs):
  return jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2), **kwargs)


def _scan_is_faster(g, S0, segments):
  plain = g is None and segments is None and target_platform() == "cpu"
  size = max(S0.shape[2:])
  most = _SCANNED_SMALL if size <= 64 else _SCANNED
  return plain and size < 128 and S0.size * S0.dtype.itemsize <= most


@functools.partial(jax.custom_vjp, nondiff_argnames=("scale", "sizes", "scanned"))
def _chunkwise(inputs, S0, scale, sizes, scanned):
  """Return (o, S) of a call that is not differentiated.

  Args:
    scanned: Number of tokens to scan over one by one, or None to compute in chunks.
  """
  if scanned is None:
    return _forward(inputs, S0, scale, sizes, scanned)[0]
  L, dtype = inputs.v.shape[1], S0.dtype
  q, k, v, beta = (x[:, :scanned].astype(dtype) for x in inputs[:4])
  q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q * scale, k))
  with matmul_precision_for(inputs.v.dtype):
    o, S = recurrent(q, k, v, beta, None, S0, None)
  return _pad(o, L - scanned).astype(inputs.v.dtype), S


def _forward(inputs, S0, scale, sizes, scanned):
  forward = functools.partial(_forward_by_blocks, scale=scale, sizes=sizes)
  outputs, residuals = _fold_vmap(forward)(inputs, S0)
  return outputs, (inputs, residuals)


def _forward_by_blocks(inputs, S0, *, scale, sizes):
  """Return (o, S) and the residuals besides the inputs: X, Z, R and the states between blocks."""
  indexer = BlockIndexer(inputs, sizes)

  def run(correct):
    def one_block(carry, block_index):
      S, states, o = carry
      S = jnp.where(block_index[1] == 0, zero_nonfinite(indexer.state(S0, block_index)), S)
      x = indexer.inputs(inputs, block_index, scale, S.dtype)
      decay, P, KK = _over_chunks(one_chunk.intra)(x)
      X = unit_lower_inverse(x.beta[..., None] * KK)
      inverse = _with_correction(X, x, KK, decay, correct)
      S_next, (O, Z, R) = _scan_chunks(one_chunk.output, S, inverse, (x, decay, P))
      states = indexer.update_state(states, S_next, block_index)
      nan = indexer.chunks(reached, block_index, S.shape[1], bool)[..., None]
      O = jnp.where(nan, jnp.nan, O)
      return (S_next, states, indexer.update(o, O, block_index)), (X, S, Z, R)

    indices = indexer.block_indices
    first = jnp.zeros_like(indexer.state(S0, indices[0]))
    (_, S, o), saved = lax.scan(one_block, (first, _empty(S0), _empty(inputs.v)), indices)
    return (o, S), saved

  norms = jnp.square(inputs.k.astype(S0.dtype)).sum(axis=-1)
  norms = jnp.repeat(norms, inputs.v.shape[2] // norms.shape[2], axis=2)
  reflecting = _reflecting(inputs, norms)
  reached = _nonfinite_outputs(inputs, norms, S0)
  with matmul_precision_for(inputs.v.dtype):
    (o, S), saved = _cond(reflecting, run)
  S = jnp.where(reached[:, -1, :, None, None], jnp.nan, S)
  return (o, S), (reflecting, saved)


def _backward(scale, sizes, scanned, residuals, cotangents):
  backward = functools.partial(_backward_by_blocks, scale=scale, sizes=sizes)
  grads, dS0 = _fold_vmap(backward)(*residuals, cotangents)
  return Inputs(*grads, segments=None, carried_segment=None), dS0


def _backward_by_blocks(inputs, residuals, cotangents, *, scale, sizes):
  """Return the gradients of all inputs, block by block in reverse; recomputes inner states."""
  reflecting, saved = residuals
  do, dS_last = cotangents
  indexer = BlockIndexer(inputs, sizes)

  def run(correct):
    def one_block(carry, xs):
      dS, dS0, grads = carry
      block_index, (X, S, Z, R) = xs
      is_last = block_index[1] == indexer.last_token_index
      dS = jnp.where(is_last, indexer.state(dS_last, block_index), dS)
      x = indexer.inputs(inputs, block_index, scale, S.dtype)
      dO = indexer.chunks(do, block_index, S.shape[1], S.dtype)
      decay = _over_chunks(one_chunk.chunk_decay)(x)
      G, from_output = _over_chunks(one_chunk.before_scan)(x, decay, dO)
      X = _with_correction(X, x, G[..., 1, :, :], decay, correct)
      _, S = _scan_chunks(one_chunk.state, S, R, (x, decay))
      dS, dstates = _scan_chunks(one_chunk.dstate, dS, X, (x, decay, from_output), reverse=True)
      dq, *rest = _over_chunks(one_chunk.gradients)(x, decay, G, (S, Z, R), dO, dstates)
      update = lambda full, block: indexer.update(full, block, block_index)
      grads = jax.tree.map(update, grads, (dq * scale, *rest))
      return (dS, indexer.update_state(dS0, dS, block_index), grads), None

    indices = indexer.block_indices
    last = jnp.zeros_like(indexer.state(dS_last, indices[0]))
    empty = jax.tree.map(_empty, (dS_last, tuple(inputs[:5])))
    (_, dS0, grads), _ = lax.scan(one_block, (last, *empty), (indices, saved), reverse=True)
    return grads, dS0

  with matmul_precision_for(inputs.v.dtype):
    return _cond(reflecting, run)


_chunkwise.defvjp(_forward, _backward)


def _fold_vmap(f):
  """On a CPU fold `jax.vmap` into the batch, so that blocks still fit in the cache."""
  return vmap_as_batch(f, _NO_FORWARD_MODE) if target_platform() == "cpu" else f


def _nonfinite_outputs(inputs, norms, S0):
  """`[B L H]`: where o is NaN, from a non-finite token to the end of its segment.

  Blocks compute with zeros instead (`BlockIndexer.inputs`).
  """
  bad = has_nonfinite(norms, inputs.v, inputs.beta, gate=inputs.g)
  return nonfinite_reach(bad, inputs.segments, before=has_nonfinite(S0[:, None])[:, 0])


def _empty(x):
  return lax.empty(x.shape, x.dtype)


def _over_chunks(f):
  """Map f over every chunk of every head, arrays [M B H ·]."""

  def mapped(*args):
    lead = jax.tree.leaves(args)[0].shape[:3]
    # One axis, not three: jaxlib 0.10.2's CPU backend crashes on matmuls of more than six.
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), args)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), jax.vmap(f)(*flat))

  return mapped


def _scan_chunks(f, carry, first, xs, reverse=False):
  """Scan f(carry, (first, *xs)) over chunks, all heads at once."""
  return lax.scan(jax.vmap(jax.vmap(f)), carry, (first, *xs), reverse=reverse)


def _reflecting(inputs, norms):
  """Whether a repeated key could reflect the state; None where no correction is applied."""
  if inputs.g is not None or inputs.k.dtype != jnp.float32:
    return None
  return jnp.max(zero_nonfinite(inputs.beta * norms)) > _REFLECTING


def _cond(reflecting, run):
  if reflecting is None:
    return run(False)
  return lax.cond(reflecting, lambda: run(True), lambda: run(False))


def _with_correction(X, x, KK, decay, correct):
  if not correct:
    return Inverse(X, None)
  # (I + A + a)^-1 = X - X a X for A's rounding error a. Added to X it would be rounded away.
  return Inverse(X, -(X @ _over_chunks(one_chunk.rounding_error)(x, KK, decay) @ X))
