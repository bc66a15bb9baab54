"""Decayed linear attention in chunks: products inside, one state per chunk, its own backward.

With b the log decay summed from the start of the chunk, a chunk that starts from S gives

  O = (Q e^b) S + (Q K^T * e^{b_i - b_j} * M) V,   S <- e^{b_C} S + (K e^{b_C - b})^T V.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltanet_jax.ops import chunk_decay as decays
from deltanet_jax.ops.dtypes import products_for
from pallas_kernels.autodiff import backward_by_hand


def chunkwise(q, k, v, g, S0, documents, *, chunk, given):
  """(o, S) of linear attention, `[B L H ·]`, all with as many heads as v.

  Args:
    documents: `[B L]` number of each token's document, ascending, or None.
    given: dtype in which the values came; products are as exact as it deserves.
  """
  B, L = q.shape[:2]
  C = min(chunk, 1 << (L - 1).bit_length())
  n = -(-L // C)
  pad = n * C - L
  carried_document = None
  if documents is not None:
    documents = jnp.pad(documents, ((0, 0), (0, pad)), mode="edge")
    # A chunk starts from the state of the token before it, S0 belongs to the first document.
    carried_document = jnp.concatenate([documents[:, :1], documents[:, C - 1 : -1 : C]], axis=1).T

  def split(x):
    """[B L ..] to [n B C ..]; padded tokens are zero, so their g is 0 and they write nothing."""
    if x.shape[1] == L:
      x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, n, C, *x.shape[2:]), 1, 0)

  one_head = lambda *chunk: _chunk(*chunk, given)
  heads = jax.vmap(one_head, in_axes=(0, 1, 1, 1, 1, None, None), out_axes=(0, 1))
  body = lambda S, xs: jax.vmap(heads)(S, *xs)
  inputs = jax.tree.map(split, (q, k, v, g, documents))
  S, o = lax.scan(body, S0, (*inputs, carried_document))
  return jnp.moveaxis(o, 0, 1).reshape(B, L + pad, *o.shape[3:])[:, :L], S


# From here on: one chunk of one head.


def _causal(C, dtype):
  return jnp.asarray(np.tril(np.ones((1, C, C))), dtype)


def _backward(given, args, cotangents):
  """Gradients with scores and decays computed anew."""
  S, Q, K, V, g, documents, carried_document = args
  dS, dO = cotangents
  # Asked for here too: the backward is traced after the forward's context has ended.
  with products_for(given):
    decay = decays.chunk_decay(g, documents, carried_document, V.dtype)
    causal = _causal(K.shape[0], K.dtype)
    P = decays.scores(Q[None], K, decay, causal)
    into, out, whole = (1, 1, 1) if decay is None else decay[:3]
    E = (dO @ V.T)[None] * causal
    dF_S, dK_S = (into * (dO @ S.T))[None], out * (V @ dS.T)
    carried = (whole * S * dS).sum(axis=1)
    dF, dK, dg = decays.score_gradients(g, Q[None], K, decay, P, E, dF_S, dK_S, carried)
    dV = P[0].T @ dO + (out * K) @ dS
    dS = whole * dS + (into * Q).T @ dO
  return dS, dF[0], dK, dV, dg, None, None


@backward_by_hand(_backward, static=(7,))
def _chunk(S, Q, K, V, g, documents, carried_document, given):
  """(S after the chunk, O)."""
  with products_for(given):
    decay = decays.chunk_decay(g, documents, carried_document, V.dtype)
    P = decays.scores(Q[None], K, decay, _causal(K.shape[0], K.dtype))[0]
    into, out, whole = (1, 1, 1) if decay is None else decay[:3]
    return whole * S + (out * K).T @ V, (into * Q) @ S + P @ V
