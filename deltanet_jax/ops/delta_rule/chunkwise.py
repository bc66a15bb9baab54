"""The delta rule in chunks (WY/UT form), with a backward that recomputes the states.

Here is the order in which the work is done; one chunk is in `chunk.py`, cutting in `blocks.py`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from deltanet_jax.ops.delta_rule import chunk as one_chunk
from deltanet_jax.ops.delta_rule.blocking import BlockIndexer, Inputs, sizes_for
from deltanet_jax.ops.delta_rule.chunk import Inverse
from deltanet_jax.ops.delta_rule.recurrent import recurrent
from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.dtypes import matmul_precision_for
from deltanet_jax.ops.nonfinite import has_nonfinite, nonfinite_reach, zero_nonfinite
from deltanet_jax.ops.triangular import unit_lower_inverse
from deltanet_jax.ops.vmap_as_batch import vmap_as_batch

# With 1 - beta |k|^2 near -1 a repeated key reflects the state for ever, and the rounding of K K^T,
# the same in every chunk, adds up: 1e-4 after 4096 tokens. From here on it is corrected for, in
# float32 without a gate: coarser inputs are not that exact, and a decay forgets errors too. The
# choice is made once per call, since a branch per chunk costs a tenth of the time.
_REFLECTING = 1.98


# Bytes of all states up to which the token scan, whose states then stay in the cache, is faster
# than chunks where no gradient is taken, for head sizes up to 64 and below 128. From 128 on, and
# with gates or segments, chunks win from the start. Measurements: BUILD_NOTES.md.
_SCANNED_SMALL, _SCANNED = 2**23, 2**18


def chunkwise(q, k, v, beta, g, S0, segments, *, scale, chunk, primal="chunks"):
  """(o, S) of the delta rule, `[B L H ·]`; q and k may have fewer heads than v.

  Args:
    segments: `[B L]` number of each token's segment, ascending, or None.
    chunk: power of two, or None for the fastest on a CPU.
    primal: "fastest" lets a call that is not differentiated run token by token where that is
      faster on a CPU; "chunks" never does.
  """
  if primal not in ("chunks", "fastest"):
    raise ValueError(f"primal is {primal!r}, expected 'chunks' or 'fastest'.")
  L, sizes = q.shape[1], sizes_for(q, v, g, chunk)
  scanned = L if primal == "fastest" and _scan_is_faster(g, S0, segments) else None
  C = sizes.C
  pad = -L % (sizes.chunks * C)
  if pad:
    # A padded token has beta = 0 and g = 0: it leaves the state as it is.
    q, k, v, beta, g = jax.tree.map(lambda x: _pad(x, pad), (q, k, v, beta, g))
    segments = None if segments is None else _pad(segments, pad, mode="edge")
  carried_document = None
  if segments is not None:
    # The state a chunk receives belongs to the segment of the token before it, S0 to the first.
    carried_document = jnp.concatenate([segments[:, :1], segments[:, C - 1 : -1 : C]], axis=1)
  inputs = Inputs(q, k, v, beta, g, segments, carried_document)
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
  """(o, S), as JAX calls it without gradients: `scanned` tokens one by one, or None for chunks."""
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
  outputs, kept = _vmapped_sequentially(forward)(inputs, S0)
  return outputs, (inputs, kept)


def _forward_by_blocks(inputs, S0, *, scale, sizes):
  """o and S; kept beside the inputs: X, Z, R and the states at block borders."""
  places = BlockIndexer(inputs, sizes)

  def run(correct):
    def one_block(carry, place):
      S, states, o = carry
      S = jnp.where(place[1] == 0, zero_nonfinite(places.take_state(S0, place)), S)
      x = places.inputs(inputs, place, scale, S.dtype)
      decay, P, KK = _over_chunks(one_chunk.intra)(x)
      X = unit_lower_inverse(x.beta[..., None] * KK)
      rest = _with_rest(X, x, KK, decay, correct)
      S_next, (O, Z, R) = _scan_chunks(one_chunk.output, S, rest, (x, decay, P))
      states = places.put_state(states, S_next, place)
      O = jnp.where(places.chunks(lost, place, S.shape[1], bool)[..., None], jnp.nan, O)
      return (S_next, states, places.put(o, O, place)), (X, S, Z, R)

    first = jnp.zeros_like(places.take_state(S0, places.numbers[0]))
    (_, S, o), saved = lax.scan(one_block, (first, _empty(S0), _empty(inputs.v)), places.numbers)
    return (o, S), saved

  norms = jnp.square(inputs.k.astype(S0.dtype)).sum(axis=-1)
  norms = jnp.repeat(norms, inputs.v.shape[2] // norms.shape[2], axis=2)
  reflecting = _reflecting(inputs, norms)
  lost = _lost(inputs, norms, S0)
  with matmul_precision_for(inputs.v.dtype):
    (o, S), saved = _either(reflecting, run)
  S = jnp.where(lost[:, -1, :, None, None], jnp.nan, S)
  return (o, S), (reflecting, saved)


def _backward(scale, sizes, scanned, residuals, cotangents):
  backward = functools.partial(_backward_by_blocks, scale=scale, sizes=sizes)
  grads, dS0 = _vmapped_sequentially(backward)(*residuals, cotangents)
  return Inputs(*grads, segments=None, carried_document=None), dS0


def _backward_by_blocks(inputs, kept, cotangents, *, scale, sizes):
  """Gradients of every input, block by block in reverse, the states inside a block anew."""
  reflecting, saved = kept
  do, dS_last = cotangents
  places = BlockIndexer(inputs, sizes)

  def run(correct):
    def one_block(carry, xs):
      dS, dS0, grads = carry
      place, (X, S, Z, R) = xs
      dS = jnp.where(place[1] == places.last_token, places.take_state(dS_last, place), dS)
      x = places.inputs(inputs, place, scale, S.dtype)
      dO = places.chunks(do, place, S.shape[1], S.dtype)
      decay = _over_chunks(one_chunk.chunk_decay)(x)
      G, from_output = _over_chunks(one_chunk.before_scan)(x, decay, dO)
      X = _with_rest(X, x, G[..., 1, :, :], decay, correct)
      _, S = _scan_chunks(one_chunk.state, S, R, (x, decay))
      dS, dstates = _scan_chunks(one_chunk.dstate, dS, X, (x, decay, from_output), reverse=True)
      dq, *rest = _over_chunks(one_chunk.gradients)(x, decay, G, (S, Z, R), dO, dstates)
      put = lambda whole, part: places.put(whole, part, place)
      grads = jax.tree.map(put, grads, (dq * scale, *rest))
      return (dS, places.put_state(dS0, dS, place), grads), None

    last = jnp.zeros_like(places.take_state(dS_last, places.numbers[0]))
    empty = jax.tree.map(_empty, (dS_last, tuple(inputs[:5])))
    (_, dS0, grads), _ = lax.scan(one_block, (last, *empty), (places.numbers, saved), reverse=True)
    return grads, dS0

  with matmul_precision_for(inputs.v.dtype):
    return _either(reflecting, run)


_chunkwise.defvjp(_forward, _backward)


def _vmapped_sequentially(f):
  """On a CPU, where blocks are small for the cache's sake; elsewhere members run side by side."""
  return vmap_as_batch(f) if target_platform() == "cpu" else f


def _lost(inputs, norms, S0):
  """`[B L H]`: where o is NaN, from a token that is not finite to the end of its segment.

  Blocks are given zeros in its place (`BlockIndexer.inputs`).
  """
  bad = has_nonfinite(norms, inputs.v, inputs.beta, gate=inputs.g)
  return nonfinite_reach(bad, inputs.segments, before=has_nonfinite(S0[:, None])[:, 0])


def _empty(x):
  return lax.empty(x.shape, x.dtype)


def _over_chunks(f):
  """f for every chunk of every head, arrays [M B H ·]."""

  def mapped(*args):
    lead = jax.tree.leaves(args)[0].shape[:3]
    # One axis, not three: jaxlib 0.10.2's CPU backend crashes on products of more than six.
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), args)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), jax.vmap(f)(*flat))

  return mapped


def _scan_chunks(f, carry, first, xs, reverse=False):
  """Scan of f(carry, (first, *xs)) over chunks, all heads at once."""
  return lax.scan(jax.vmap(jax.vmap(f)), carry, (first, *xs), reverse=reverse)


def _reflecting(inputs, norms):
  """Whether a repeated key could reflect the state; None where no correction is made at all."""
  if inputs.g is not None or inputs.k.dtype != jnp.float32:
    return None
  return jnp.max(zero_nonfinite(inputs.beta * norms)) > _REFLECTING


def _either(reflecting, run):
  if reflecting is None:
    return run(False)
  return lax.cond(reflecting, lambda: run(True), lambda: run(False))


def _with_rest(X, x, KK, decay, correct):
  if not correct:
    return Inverse(X, None)
  # (I + A + a)^-1 = X - X a X for the little a that A lacks. Added to X it would be rounded away.
  return Inverse(X, -(X @ _over_chunks(one_chunk.missing)(x, KK, decay) @ X))
