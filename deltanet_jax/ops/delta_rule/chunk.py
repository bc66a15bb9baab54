"""The delta rule of one chunk of one head, `[C ·]`, forward and backward; callers `vmap`.

The mathematics is in README.md beside this file. The two kinds of rows that meet keys and state,
queries and keys, are stacked as F = [Q, K], so one product serves both.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.ops import decay as decays


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


def chunk_decay(x):
  """Decay factors of the chunk, None without gate and segments."""
  return decays.chunk_decay(x.g, x.segments, x.carried_segment, x.v.dtype)


def _causal(C, dtype):
  """Which scores there are: Q K^T on and below the diagonal, K K^T strictly below it."""
  lower = np.tril(np.ones((C, C)))
  return jnp.asarray(np.stack([lower, np.tril(lower, -1)]), dtype)


def _scores(F, K, decay):
  return decays.scores(F, K, decay, _causal(K.shape[0], K.dtype))


def intra(x):
  """What does not depend on the state: decay, P = Q K^T and K K^T, both masked."""
  decay = chunk_decay(x)
  P, KK = _scores(jnp.stack([x.q, x.k]), x.k, decay)
  return decay, P, KK


def rounding_error(x, KK, decay):
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


def output(S, xs):
  """S after the chunk; its output O, and Z = V - K S and the pseudo values R for the backward."""
  X, x, decay, P = xs
  QS, KS = _into(jnp.stack([x.q, x.k]), decay) @ S
  R = X.of_sum(x.beta[:, None] * x.v, -x.beta[:, None] * KS)
  return _next_state(S, R, x, decay), (QS + P @ R, x.v - KS, R)


def state(S, xs):
  """S after the chunk, and S before it."""
  R, x, decay = xs
  return _next_state(S, R, x, decay), S


def before_scan(x, decay, dO):
  """The scores again, and what dO gives to R and to the state before the chunk."""
  G = _scores(jnp.stack([x.q, x.k]), x.k, decay)
  return G, (G[0].T @ dO, _into(x.q, decay).T @ dO)


def dstate(dS, xs):
  """dS of the state before the chunk; kept are dS after it and dY, Y = beta Z."""
  X, x, decay, (dR, dS_before) = xs
  k_out = x.k if decay is None else decay.out * x.k
  dY = X.T.of_sum(dR, k_out @ dS)
  dS_before = dS_before - _into(x.k, decay).T @ (x.beta[:, None] * dY)
  return dS_before + (dS if decay is None else decay.whole * dS), (dS, dY)


def gradients(x, decay, G, states, dO, dstates):
  """(dq, dk, dv, dbeta, dg) of one chunk."""
  (S, Z, R), (dS, dY) = states, dstates
  F = jnp.stack([x.q, x.k])
  # Queries and keys again: rows F S get the gradients D, the scores G of F and K get E.
  D = jnp.stack([dO, -dY])
  E = jnp.einsum("xiv,jv->xij", D, R) * _causal(R.shape[0], R.dtype)
  # A product with ones: as a sum over rows XLA:CPU makes it 4 % of forward and backward together.
  dbeta = ((dY * Z) @ jnp.ones((Z.shape[1], 1), Z.dtype))[:, 0] + (E[1] * G[1]).sum(axis=1)
  strength = jnp.stack([jnp.ones_like(x.beta), x.beta])[:, :, None]
  D, E = strength * D, strength * E
  dF_S, dk_S, carried = _into(D @ S.T, decay), R @ dS.T, None
  if decay is not None:
    dk_S = decay.out * dk_S
    carried = (decay.whole * S * dS).sum(axis=1)
  dF, dk, dg = decays.score_gradients(x.g, F, x.k, decay, G, E, dF_S, dk_S, carried)
  return dF[0], dF[1] + dk, -D[1], dbeta, dg
