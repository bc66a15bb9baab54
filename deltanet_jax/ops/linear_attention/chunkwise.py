"""Chunkwise form of decayed linear attention: matmuls inside a chunk, with a custom VJP.

With b the log decay summed from the start of the chunk, a chunk that starts from S gives

  O = (Q e^b) S + (Q K^T * e^{b_i - b_j} * M) V,   S <- e^{b_C} S + (K e^{b_C - b})^T V.

A decay of the value channels, summed to e, adds further factors: e^e on what is read from S,
e^{e_i - e_j} and e^{e_C - e} on the values, and e^{e_C} on S from the right.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deltanet_jax.ops import decay as decays
from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.dtypes import matmul_precision_for
from pallas_kernels.common.autodiff import custom_backward


def chunkwise(q, k, v, g, h, S0, segments, *, chunk, input_dtype):
  """Return (o, S) of linear attention, `[B L H ·]`, all with as many heads as v.

  Args:
    segments: `[B L]` segment numbers from `number_segments`, or None.
    input_dtype: Dtype of the original values; it determines the matmul precision.
  """
  B, L = q.shape[:2]
  C = min(chunk, 1 << (L - 1).bit_length())
  n = -(-L // C)
  pad = n * C - L
  carried_segment = None
  if segments is not None:
    segments = jnp.pad(segments, ((0, 0), (0, pad)), mode="edge")
    # A chunk starts from the state of the previous token's segment; S0 belongs to the first.
    carried_segment = jnp.concatenate([segments[:, :1], segments[:, C - 1 : -1 : C]], axis=1).T

  def split(x):
    """[B L ..] to [n B C ..]; padded tokens are zero: they neither decay nor write."""
    if x.shape[1] == L:
      x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, n, C, *x.shape[2:]), 1, 0)

  one_head = lambda *chunk: _chunk(*chunk, input_dtype)
  heads = jax.vmap(one_head, in_axes=(0, 1, 1, 1, 1, 1, None, None), out_axes=(0, 1))
  batch = lambda S, xs: jax.vmap(heads)(S, *xs)

  def one_sequence(S, xs):
    *sequences, segments, carried_segment = jax.tree.map(lambda x: x[0], xs)
    sequences = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), sequences)
    own = jax.vmap(one_head, in_axes=(0, 0, 0, 0, 0, 0, None, None))
    S, O = own(S[0], *sequences, segments, carried_segment)
    return S[None], jnp.moveaxis(O, 0, 1)[None]

  # With a batch axis of size 1 XLA:CPU takes up to twice the time for per-channel gates, so it is
  # dropped there. Measurements: BUILD_NOTES.md.
  body = one_sequence if B == 1 and target_platform() == "cpu" else batch
  inputs = jax.tree.map(split, (q, k, v, g, h, segments))
  S, o = lax.scan(body, S0, (*inputs, carried_segment))
  return jnp.moveaxis(o, 0, 1).reshape(B, L + pad, *o.shape[3:])[:, :L], S


# From here on: one chunk of one head.


def _causal(C, dtype):
  return jnp.asarray(np.tril(np.ones((1, C, C))), dtype)


def _decays(V, g, h, segments, carried_segment):
  """Decays of the rows (keys) and columns (values) of S, each with factors (into, out, total)."""
  rows = decays.chunk_decay(g, segments, carried_segment, V.dtype)
  # Segments are applied once: the rows' decay already removes other segments.
  columns = None if h is None else decays.chunk_decay(h, None, None, V.dtype)
  factors = lambda decay: (1, 1, 1) if decay is None else decay[:3]
  into, out, total = factors(columns)
  return rows, columns, factors(rows), (into, out, total if h is None else total.T)


def _backward(input_dtype, args, cotangents):
  """Return the gradients; recomputes scores and decays."""
  S, Q, K, V, g, h, segments, carried_segment = args
  dS, dO = cotangents
  # Set here too: the backward pass is traced after the forward's context has ended.
  with matmul_precision_for(input_dtype):
    rows, columns, (into, out, total), (into_h, out_h, total_h) = _decays(
      V, g, h, segments, carried_segment
    )
    causal = _causal(K.shape[0], K.dtype)
    P = decays.scores(Q[None], K, rows, causal)
    E = decays.scores(dO[None], V, columns, causal)
    read, dV_S = into_h * ((into * Q) @ S), out_h * ((out * K) @ dS)
    dF_S, dK_S = (into * ((into_h * dO) @ S.T))[None], out * ((out_h * V) @ dS.T)
    carried = total * S * total_h * dS
    dF, dK, dg = decays.score_gradients(g, Q[None], K, rows, P, E, dF_S, dK_S, carried.sum(axis=1))
    # Reading values is the transpose of scoring them by dO, so `score_gradients` covers both.
    _, dV, dh = decays.score_gradients(
      h, dO[None], V, columns, E, P, read[None], dV_S, carried.sum(axis=0)
    )
    dS = total * dS * total_h + (into * Q).T @ (into_h * dO)
  return dS, dF[0], dK, dV, dg, dh, None, None


@custom_backward(_backward, static=(8,))
def _chunk(S, Q, K, V, g, h, segments, carried_segment, input_dtype):
  """Return (S after the chunk, O)."""
  with matmul_precision_for(input_dtype):
    rows, columns, (into, out, total), (into_h, out_h, total_h) = _decays(
      V, g, h, segments, carried_segment
    )
    P = decays.scores(Q[None], K, rows, _causal(K.shape[0], K.dtype))
    O = into_h * ((into * Q) @ S) + decays.read(P, V, columns)[0]
    return total * S * total_h + (out * K).T @ (out_h * V), O
