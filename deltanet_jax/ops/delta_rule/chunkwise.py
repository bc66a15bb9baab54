"""The delta rule in chunks (WY/UT form), with a backward that recomputes the states.

Mathematics, for one chunk and one head, in README.md beside this file. The two kinds of rows that
meet keys and state, queries and keys, are stacked as F = [Q, K], so one product serves both.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltanet_jax.ops import chunk_decay as decays
from deltanet_jax.ops.dtypes import products_for
from deltanet_jax.ops.triangular import unit_lower_inverse

# Tokens times head size that are worked on together: 512 tokens of size 64. The intermediates of
# one block stay in the CPU's cache, none of them ever has the length of the sequence, and a block
# still fills a GPU. A decay per key channel makes the scores sixteen times as large. Measurements
# of this and of the default chunk: BUILD_NOTES.md.
_BLOCK = 2**15
_BLOCK_VECTOR = 2**13

# With 1 - beta |k|^2 near -1 a repeated key reflects the state for ever, and the rounding of K K^T,
# the same in every chunk, adds up: 1e-4 after 4096 tokens. From here on it is corrected for, in
# float32 without a gate: coarser inputs are not that exact, and a decay forgets errors too. The
# choice is made once per call, since a branch per chunk costs a tenth of the time.
_REFLECTING = 1.98


class Inverse(NamedTuple):
  """X = (I + A)^-1, and if it is asked for a rest below X's last digit."""

  X: jax.Array
  rest: jax.Array | None

  def of_sum(self, a, b):
    """X (a + b), with the digits that the sum itself loses if a rest is asked for."""
    Y = a + b
    if self.rest is None:
      return self.X @ Y
    b_of_Y = Y - a
    lost = (a - (Y - b_of_Y)) + (b - b_of_Y)
    return self.X @ Y + (self.X @ lost + self.rest @ Y)

  @property
  def T(self):
    return Inverse(self.X.T, None if self.rest is None else self.rest.T)


class Inputs(NamedTuple):
  """Whole sequences `[B L H ·]`, or one chunk of one head `[C ·]`.

  `carried_document`, the number of the document that a chunk's first state is of, is per chunk.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  beta: jax.Array
  g: jax.Array | None
  documents: jax.Array | None
  carried_document: jax.Array | None


def chunkwise(q, k, v, beta, g, S0, documents, *, scale, chunk, autodiff=False):
  """(o, S) of the delta rule, `[B L H ·]`; q and k may have fewer heads than v.

  Args:
    documents: `[B L]` number of each token's document, ascending, or None.
    chunk: power of two, or None for the fastest on a CPU.
    autodiff: leaves the gradient to JAX, which then keeps every intermediate; for comparison.
  """
  L, size = q.shape[1], max(q.shape[3], v.shape[3])
  C = min(chunk or (32 if size <= 64 else 64), 1 << (L - 1).bit_length())
  tokens = (_BLOCK if g is None or g.ndim == 3 else _BLOCK_VECTOR) // size
  chunks = -(-L // C)
  blocks = -(-chunks // max(tokens // C, 1))
  per_block = -(-chunks // blocks)
  pad = blocks * per_block * C - L
  if pad:
    # A padded token has beta = 0 and g = 0: it leaves the state as it is.
    q, k, v, beta, g = jax.tree.map(lambda x: _pad(x, pad), (q, k, v, beta, g))
    documents = None if documents is None else _pad(documents, pad, mode="edge")
  carried_document = None
  if documents is not None:
    # The state a chunk receives belongs to the document of the token before it, S0 to the first.
    carried_document = jnp.concatenate([documents[:, :1], documents[:, C - 1 : -1 : C]], axis=1)
  inputs = Inputs(q, k, v, beta, g, documents, carried_document)
  if autodiff:
    (o, S), _ = _forward(inputs, S0, scale, C, per_block)
  else:
    o, S = _chunkwise(inputs, S0, scale, C, per_block)
  return (o[:, :L] if pad else o), S


def _pad(x, pad, **kwargs):
  return jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2), **kwargs)


@functools.partial(jax.custom_vjp, nondiff_argnames=("scale", "C", "per_block"))
def _chunkwise(inputs, S0, scale, C, per_block):
  return _forward(inputs, S0, scale, C, per_block)[0]


def _forward(inputs, S0, scale, C, per_block):
  """o and S; as residuals the inputs, the chunk inverses and the states at block borders."""

  def run(correct):
    def one_block(carry, i):
      S, o = carry
      x = _block(inputs, i, scale, C, per_block, S.dtype)
      decay, P, KK = _over_chunks(_intra)(x)
      X = unit_lower_inverse(x.beta[..., None] * KK)
      S_next, O = _scan_chunks(_output, S, _with_rest(X, x, KK, decay, correct), (x, decay, P))
      return (S_next, _write(o, O, i)), (X, S)

    o = lax.empty(inputs.v.shape, inputs.v.dtype)
    return lax.scan(one_block, (S0, o), _numbers(inputs, C, per_block))

  reflecting = _reflecting(inputs)
  with products_for(inputs.v.dtype):
    (S, o), saved = _either(reflecting, run)
  return (o, S), (inputs, reflecting, saved)


def _backward(scale, C, per_block, residuals, cotangents):
  """Gradients of every input, block by block in reverse, the states inside a block anew."""
  inputs, reflecting, saved = residuals
  do, dS = cotangents

  def run(correct):
    def one_block(carry, ixs):
      dS, grads = carry
      i, (X, S) = ixs
      x = _block(inputs, i, scale, C, per_block, S.dtype)
      dO = _split_heads(_slice(do, i, C * per_block), C, S.shape[1], S.dtype)
      decay = _over_chunks(_decay)(x)
      G, from_output = _over_chunks(_before_scan)(x, decay, dO)
      X = _with_rest(X, x, G[..., 1, :, :], decay, correct)
      _, states = _scan_chunks(_state, S, X, (x, decay))
      dS, dstates = _scan_chunks(_dstate, dS, X, (x, decay, from_output), reverse=True)
      dq, *rest = _over_chunks(_gradients)(x, decay, G, states, dO, dstates)
      new = (dq * scale, *rest)
      return (dS, jax.tree.map(lambda whole, part: _write(whole, part, i), grads, new)), None

    grads = jax.tree.map(lambda x: lax.empty(x.shape, x.dtype), tuple(inputs[:5]))
    xs = (_numbers(inputs, C, per_block), saved)
    return lax.scan(one_block, (dS, grads), xs, reverse=True)[0]

  with products_for(inputs.v.dtype):
    dS, grads = _either(reflecting, run)
  return Inputs(*grads, documents=None, carried_document=None), dS


_chunkwise.defvjp(_forward, _backward)


def _numbers(inputs, C, per_block):
  return jnp.arange(inputs.q.shape[1] // (C * per_block))


def _slice(x, i, size):
  return lax.dynamic_slice_in_dim(x, i * size, size, axis=1)


def _split_heads(x, C, heads, dtype):
  """[B T H ·] to [T/C B heads C ·], each head repeated to make up `heads`."""
  B, T, H = x.shape[:3]
  x = jnp.moveaxis(x.reshape(B, T // C, C, *x.shape[2:]), (1, 3), (0, 2)).astype(dtype)
  return x if heads == H else jnp.repeat(x, heads // H, axis=2)


def _write(whole, block, i):
  """Puts the chunks [M B heads C ·] of block i into [B L H ·], summing repeated heads."""
  M, B, heads, C = block.shape[:4]
  H = whole.shape[2]
  if heads != H:
    block = block.reshape(M, B, H, heads // H, *block.shape[3:]).sum(axis=3)
  block = jnp.moveaxis(block, (0, 2), (1, 3)).reshape(B, M * C, *whole.shape[2:])
  return lax.dynamic_update_slice_in_dim(whole, block.astype(whole.dtype), i * M * C, axis=1)


def _block(inputs, i, scale, C, per_block, dtype):
  """Block i of the inputs as chunks, [M B H C ·]."""
  heads = inputs.v.shape[2]
  q, k, v, beta, g = jax.tree.map(
    lambda x: _split_heads(_slice(x, i, C * per_block), C, heads, dtype), tuple(inputs[:5])
  )
  documents, carried_document = inputs.documents, inputs.carried_document
  if documents is not None:
    documents = _split_heads(
      _slice(documents, i, C * per_block)[:, :, None], C, heads, documents.dtype
    )
    carried_document = _split_heads(
      _slice(carried_document, i, per_block)[:, :, None], 1, heads, documents.dtype
    )
    carried_document = carried_document[..., 0]
  return Inputs(q * scale, k, v, beta, g, documents, carried_document)


def _over_chunks(f):
  """f for every chunk of every head, arrays [M B H ·]."""

  def mapped(*args):
    lead = jax.tree.leaves(args)[0].shape[:3]
    # One axis, not three: jaxlib 0.10.2's CPU backend crashes on products of more than six.
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), args)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), jax.vmap(f)(*flat))

  return mapped


def _scan_chunks(f, carry, X, xs, reverse=False):
  """Scan of f(carry, (X, *xs)) over chunks, all heads at once."""
  return lax.scan(jax.vmap(jax.vmap(f)), carry, (X, *xs), reverse=reverse)


def _reflecting(inputs):
  """Whether a repeated key could reflect the state; None where no correction is made at all."""
  if inputs.g is not None or inputs.k.dtype != jnp.float32:
    return None
  norms = (inputs.k * inputs.k).sum(axis=-1)
  heads = inputs.beta.shape[2] // norms.shape[2]
  return jnp.max(inputs.beta * jnp.repeat(norms, heads, axis=2)) > _REFLECTING


def _either(reflecting, run):
  if reflecting is None:
    return run(False)
  return lax.cond(reflecting, lambda: run(True), lambda: run(False))


def _with_rest(X, x, KK, decay, correct):
  if not correct:
    return Inverse(X, None)
  # (I + A + a)^-1 = X - X a X for the little a that A lacks. Added to X it would be rounded away.
  return Inverse(X, -(X @ _over_chunks(_missing)(x, KK, decay) @ X))


# From here on: one chunk of one head.


def _decay(x):
  return decays.chunk_decay(x.g, x.documents, x.carried_document, x.v.dtype)


def _causal(C, dtype):
  """Which scores there are: Q K^T on and below the diagonal, K K^T strictly below it."""
  lower = np.tril(np.ones((C, C)))
  return jnp.asarray(np.stack([lower, np.tril(lower, -1)]), dtype)


def _scores(F, K, decay):
  return decays.scores(F, K, decay, _causal(K.shape[0], K.dtype))


def _intra(x):
  decay = _decay(x)
  P, KK = _scores(jnp.stack([x.q, x.k]), x.k, decay)
  return decay, P, KK


def _missing(x, KK, decay):
  """What rounding took from A = beta K K^T, to about 2^-32.

  K is cut at a grid so coarse (8 bits) that sums of products are exact; its rest is small.
  """
  step = jnp.exp2(jnp.ceil(jnp.log2(jnp.max(jnp.abs(x.k)))) - 8)
  coarse = jnp.where(step > 0, jnp.round(x.k / step) * step, 0)
  fine = x.k - coarse
  half = fine @ (coarse + fine / 2).T
  _, exists = (
    _causal(KK.shape[0], KK.dtype)
    if decay is None
    else (_causal(KK.shape[0], KK.dtype) * decay.same[None])
  )
  return x.beta[:, None] * exists * ((coarse @ coarse.T - KK) + (half + half.T))


def _into(F, decay):
  """Rows F [... C dk] as they meet the carried state."""
  return F if decay is None else F * decay.into.reshape((1,) * (F.ndim - 2) + decay.into.shape)


def _next_state(S, R, x, decay):
  if decay is None:
    return S + x.k.T @ R
  return decay.whole * S + (decay.out * x.k).T @ R


def _state(S, xs):
  """S after the chunk; kept are S before it, Z = V - K S and the pseudo values R."""
  X, x, decay = xs
  KS = _into(x.k, decay) @ S
  R = X.of_sum(x.beta[:, None] * x.v, -x.beta[:, None] * KS)
  Z = x.v - KS
  return _next_state(S, R, x, decay), (S, Z, R)


def _output(S, xs):
  X, x, decay, P = xs
  QS, KS = _into(jnp.stack([x.q, x.k]), decay) @ S
  R = X.of_sum(x.beta[:, None] * x.v, -x.beta[:, None] * KS)
  return _next_state(S, R, x, decay), QS + P @ R


def _before_scan(x, decay, dO):
  """The scores again, and what dO gives to R and to the state before the chunk."""
  G = _scores(jnp.stack([x.q, x.k]), x.k, decay)
  return G, (G[0].T @ dO, _into(x.q, decay).T @ dO)


def _dstate(dS, xs):
  """dS of the state before the chunk; kept are dS after it and dY, Y = beta Z."""
  X, x, decay, (dR, dS_before) = xs
  k_out = x.k if decay is None else decay.out * x.k
  dY = X.T.of_sum(dR, k_out @ dS)
  dS_before = dS_before - _into(x.k, decay).T @ (x.beta[:, None] * dY)
  return dS_before + (dS if decay is None else decay.whole * dS), (dS, dY)


def _gradients(x, decay, G, states, dO, dstates):
  """(dq, dk, dv, dbeta, dg) of one chunk."""
  (S, Z, R), (dS, dY) = states, dstates
  F = jnp.stack([x.q, x.k])
  # Queries and keys again: rows F S get the gradients D, the scores G of F and K get E.
  D = jnp.stack([dO, -dY])
  E = jnp.einsum("xiv,jv->xij", D, R) * _causal(R.shape[0], R.dtype)
  dbeta = (dY * Z).sum(axis=1) + (E[1] * G[1]).sum(axis=1)
  strength = jnp.stack([jnp.ones_like(x.beta), x.beta])[:, :, None]
  D, E = strength * D, strength * E
  dF_S, dk_S, carried = _into(D @ S.T, decay), R @ dS.T, None
  if decay is not None:
    dk_S = decay.out * dk_S
    carried = (decay.whole * S * dS).sum(axis=1)
  dF, dk, dg = decays.score_gradients(x.g, F, x.k, decay, G, E, dF_S, dk_S, carried)
  return dF[0], dF[1] + dk, -D[1], dbeta, dg
