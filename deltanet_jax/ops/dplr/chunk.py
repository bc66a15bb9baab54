"""Chunkwise DPLR recurrence: forward and backward of one chunk of one head; callers `vmap`.

README.md in this directory has the derivation. Row i of a reads the state after row i - 1, so a is
shifted up by one row (A'). Then queries and A' both read the state with the decay up to and
including their own row; they are stacked as F = [Q, A']. The written rows are stacked likewise: K
and B, with the values V and -R.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.ops import decay as decays


class Inputs(NamedTuple):
  """Chunks of heads; `carried_segment`, the segment of a chunk's initial state, is per chunk."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  a: jax.Array
  b: jax.Array
  g: jax.Array | None
  segments: jax.Array | None
  carried_segment: jax.Array | None


def chunk_decay(x):
  """Return the decay factors of the chunk, None without gate and segments."""
  return decays.chunk_decay(x.g, x.segments, x.carried_segment, x.v.dtype)


def _up(x):
  """Shift rows up by one; the last becomes zero."""
  return jnp.concatenate([x[1:], jnp.zeros_like(x[:1])])


def _down(x, first=None):
  """Shift rows down by one; the first becomes `first`, or zero."""
  return jnp.concatenate([jnp.zeros_like(x[:1]) if first is None else first, x[:-1]])


def _causal(C, dtype):
  return jnp.asarray(np.tril(np.ones((2, C, C))), dtype)


def _readers(x):
  return jnp.stack([x.q, _up(x.a)])


def _writers(x):
  return jnp.stack([x.k, x.b])


def _into(F, decay):
  """Decay rows F [2 C ·] for the matmul with the carried state."""
  return F if decay is None else F * decay.into[None]


def _out(K, decay):
  """Decay rows K [2 C ·] to the end of the chunk."""
  return K if decay is None else K * decay.out[None]


def scores(x, decay):
  """[2 2 C C]: scores of the keys K and B against Q and A'."""
  F, causal = _readers(x), _causal(*x.v.shape[:1], x.v.dtype)
  return jax.vmap(lambda K: decays.scores(F, K, decay, causal))(_writers(x))


def lower_triangle(G):
  """Return the strictly lower triangular A B^T of (I + A B^T) R = A K^T V + A S."""
  return _down(G[1, 1])


def before_scan(x, decay, G, X):
  """Return Q, W and U, where R = U + W S."""
  Q, A = _into(_readers(x), decay)
  A = _down(A, x.a[:1])
  return Q, X @ A, X @ _down(G[0, 1] @ x.v)


def output(S, xs):
  """Return S after the chunk; Q S, and R, whose row i is a_i times the previous state."""
  x, decay, (Q, W, U) = xs
  QS, R = Q @ S, U + W @ S
  return _next_state(S, R, x, decay), (QS, R)


def after_scan(x, G, QS, R):
  """Return the output O of the chunk."""
  return QS + G[0, 0] @ x.v - G[1, 0] @ R


def state(S, xs):
  """Return S after the chunk, and S before it."""
  x, decay, R = xs
  return _next_state(S, R, x, decay), S


def _next_state(S, R, x, decay):
  K, B = _out(_writers(x), decay)
  decayed = S if decay is None else decay.total * S
  return decayed + K.T @ x.v - B.T @ R


def from_output(x, decay, G, dO):
  """Return dO's gradients of R and, not through R, of the state before the chunk."""
  return -(G[1, 0].T @ dO), _into(_readers(x), decay)[0].T @ dO


def dstate(dS, xs):
  """Return dS of the state before the chunk; collect dS after it and dY, where R = X Y."""
  x, decay, X, (dR, dS_before) = xs
  B = _out(_writers(x), decay)[1]
  dY = X.T @ (dR - B @ dS)
  A = _down(_into(_readers(x), decay)[1], x.a[:1])
  decayed = dS if decay is None else decay.total * dS
  return decayed + dS_before + A.T @ dY, (dS, dY)


def gradients(x, decay, G, S, R, dO, dS, dY):
  """Return (dq, dk, dv, da, db, dg) of one chunk."""
  D, written = jnp.stack([dO, _up(dY)]), jnp.stack([x.v, -R])
  E = jnp.einsum("xiv,yjv->yxij", D, written) * _causal(*x.v.shape[:1], x.v.dtype)[None]
  dF_S = _into(jnp.einsum("xiv,cv->xic", D, S), decay)
  dK_S = _out(jnp.einsum("yjv,cv->yjc", written, dS), decay)
  carried = None
  if decay is not None:
    carried = (decay.total * S * dS).sum(axis=1)
    carried = jnp.stack([carried, jnp.zeros_like(carried)])
  pull = lambda K, G, E, dF_S, dK_S, carried: decays.score_gradients(
    x.g, _readers(x), K, decay, G, E, dF_S, dK_S, carried
  )
  # Rows read the state once, so that gradient is counted with K only, not with B too.
  dF_S = jnp.stack([dF_S, jnp.zeros_like(dF_S)])
  dF, dK, dg = jax.vmap(pull)(_writers(x), G, E, dF_S, dK_S, carried)
  dq, da = dF.sum(axis=0)
  dv = jnp.einsum("xij,xiv->jv", G[0], D) + _out(_writers(x), decay)[0] @ dS
  dg = None if x.g is None else dg.sum(axis=0)
  return dq, dK[0], dv, _down(da, dY[:1] @ S.T), dK[1], dg
