"""The DPLR recurrence of one chunk of one head, `[C ·]`, forward and backward; callers `vmap`.

The mathematics is in README.md beside this file. Row i of a reads the state that row i - 1 left, so
a is moved up by one row: then both kinds of rows that meet keys and state, queries and these, see
a state with the decay up to and including their own row. They are stacked as F = [Q, A'], and
what is written likewise as K, B with the rows V, -R.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.ops import decay as decays


class Inputs(NamedTuple):
  """Chunks of heads; `carried_segment`, that of a chunk's first state, is one number per chunk."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  a: jax.Array
  b: jax.Array
  g: jax.Array | None
  segments: jax.Array | None
  carried_segment: jax.Array | None


def chunk_decay(x):
  """Decay factors of the chunk, None without gate and segments."""
  return decays.chunk_decay(x.g, x.segments, x.carried_segment, x.v.dtype)


def _up(x):
  """Rows moved up by one; the last becomes zero."""
  return jnp.concatenate([x[1:], jnp.zeros_like(x[:1])])


def _down(x, first=None):
  """Rows moved down by one; the first becomes `first`, or zero."""
  return jnp.concatenate([jnp.zeros_like(x[:1]) if first is None else first, x[:-1]])


def _causal(C, dtype):
  return jnp.asarray(np.tril(np.ones((2, C, C))), dtype)


def _readers(x):
  return jnp.stack([x.q, _up(x.a)])


def _writers(x):
  return jnp.stack([x.k, x.b])


def _into(F, decay):
  """Rows F [2 C ·] as they meet the carried state."""
  return F if decay is None else F * decay.into[None]


def _out(K, decay):
  """Rows K [2 C ·] as they reach the end of the chunk."""
  return K if decay is None else K * decay.out[None]


def scores(x, decay):
  """[2 2 C C]: what is written along K and B, seen by Q and A'."""
  F, causal = _readers(x), _causal(*x.v.shape[:1], x.v.dtype)
  return jax.vmap(lambda K: decays.scores(F, K, decay, causal))(_writers(x))


def erasing(G):
  """The strictly lower triangular A B^T of (I + A B^T) R = A K^T V + A S."""
  return _down(G[1, 1])


def before_scan(x, decay, G, X):
  """The chunk as it meets the state: Q and W with R = U + W S, and U."""
  Q, A = _into(_readers(x), decay)
  A = _down(A, x.a[:1])
  return Q, X @ A, X @ _down(G[0, 1] @ x.v)


def output(S, xs):
  """S after the chunk; Q S, and R, whose row i is a_i times the state before it."""
  x, decay, (Q, W, U) = xs
  QS, R = Q @ S, U + W @ S
  return _next_state(S, R, x, decay), (QS, R)


def after_scan(x, G, QS, R):
  """The chunk's output O."""
  return QS + G[0, 0] @ x.v - G[1, 0] @ R


def state(S, xs):
  """S after the chunk, and S before it."""
  x, decay, R = xs
  return _next_state(S, R, x, decay), S


def _next_state(S, R, x, decay):
  K, B = _out(_writers(x), decay)
  kept = S if decay is None else decay.whole * S
  return kept + K.T @ x.v - B.T @ R


def from_output(x, decay, G, dO):
  """What dO gives to R, and to the state before the chunk other than through R."""
  return -(G[1, 0].T @ dO), _into(_readers(x), decay)[0].T @ dO


def dstate(dS, xs):
  """dS of the state before the chunk; kept are dS after it and dY, where R = X Y."""
  x, decay, X, (dR, dS_before) = xs
  B = _out(_writers(x), decay)[1]
  dY = X.T @ (dR - B @ dS)
  A = _down(_into(_readers(x), decay)[1], x.a[:1])
  kept = dS if decay is None else decay.whole * dS
  return kept + dS_before + A.T @ dY, (dS, dY)


def gradients(x, decay, G, S, R, dO, dS, dY):
  """(dq, dk, dv, da, db, dg) of one chunk."""
  D, written = jnp.stack([dO, _up(dY)]), jnp.stack([x.v, -R])
  E = jnp.einsum("xiv,yjv->yxij", D, written) * _causal(*x.v.shape[:1], x.v.dtype)[None]
  dF_S = _into(jnp.einsum("xiv,cv->xic", D, S), decay)
  dK_S = _out(jnp.einsum("yjv,cv->yjc", written, dS), decay)
  carried = None
  if decay is not None:
    carried = (decay.whole * S * dS).sum(axis=1)
    carried = jnp.stack([carried, jnp.zeros_like(carried)])
  pull = lambda K, G, E, dF_S, dK_S, carried: decays.score_gradients(
    x.g, _readers(x), K, decay, G, E, dF_S, dK_S, carried
  )
  # Rows and state are read once, so their gradient goes with the first of the two kinds of keys.
  dF_S = jnp.stack([dF_S, jnp.zeros_like(dF_S)])
  dF, dK, dg = jax.vmap(pull)(_writers(x), G, E, dF_S, dK_S, carried)
  dq, da = dF.sum(axis=0)
  dv = jnp.einsum("xij,xiv->jv", G[0], D) + _out(_writers(x), decay)[0] @ dS
  dg = None if x.g is None else dg.sum(axis=0)
  return dq, dK[0], dv, _down(da, dY[:1] @ S.T), dK[1], dg
