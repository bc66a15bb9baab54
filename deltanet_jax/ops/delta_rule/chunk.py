"""Chunkwise delta rule: forward and backward of one chunk of one head, `[C ·]`; callers `vmap`.

README.md in this directory has the derivation. Queries and keys are both multiplied by the keys and
by the state, so they are stacked as F = [Q, K] and share one matmul.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deltanet_jax.ops import decay as decays


class Inverse(NamedTuple):
  """X = (I + A)^-1, and optionally a correction below X's last digit."""

  X: jax.Array
  correction: jax.Array | None

  def of_sum(self, a, b):
    """X (a + b); with a correction, including the rounding error of the sum."""
    Y = a + b
    if self.correction is None:
      return self.X @ Y
    b_of_Y = Y - a
    lost = (a - (Y - b_of_Y)) + (b - b_of_Y)
    return self.X @ Y + (self.X @ lost + self.correction @ Y)

  @property
  def T(self):
    return Inverse(self.X.T, None if self.correction is None else self.correction.T)


def chunk_decay(x):
  """Return the decay factors of the chunk, None without gate and segments."""
  return decays.chunk_decay(x.g, x.segments, x.carried_segment, x.v.dtype)


def _causal(C, dtype):
  """Masks of the scores: Q K^T on and below the diagonal, K K^T strictly below it."""
  lower = np.tril(np.ones((C, C)))
  return jnp.asarray(np.stack([lower, np.tril(lower, -1)]), dtype)


def _scores(F, K, decay):
  return decays.scores(F, K, decay, _causal(K.shape[0], K.dtype))


def intra(x):
  """Compute the state-independent part: decay, P = Q K^T and K K^T, both masked."""
  decay = chunk_decay(x)
  P, KK = _scores(jnp.stack([x.q, x.k]), x.k, decay)
  return decay, P, KK


def rounding_error(x, KK, decay):
  """Compute the rounding error of A = beta K K^T, to about 2^-32.

  K is rounded to a grid so coarse (8 bits) that its matmul is exact; the remainder is small.
  """
  step = jnp.exp2(jnp.ceil(jnp.log2(jnp.max(jnp.abs(x.k)))) - 8)
  coarse = jnp.where(step > 0, jnp.round(x.k / step) * step, 0)
  fine = x.k - coarse
  half = fine @ (coarse + fine / 2).T
  _, mask = (
    _causal(KK.shape[0], KK.dtype)
    if decay is None
    else (_causal(KK.shape[0], KK.dtype) * decay.same[None])
  )
  return x.beta[:, None] * mask * ((coarse @ coarse.T - KK) + (half + half.T))


def _into(F, decay):
  """Decay rows F [... C dk] for the matmul with the carried state."""
  return F if decay is None else F * decay.into.reshape((1,) * (F.ndim - 2) + decay.into.shape)


def _next_state(S, R, x, decay):
  if decay is None:
    return S + x.k.T @ R
  return decay.total * S + (decay.out * x.k).T @ R


def output(S, xs):
  """Return S after the chunk, the output O, and the residuals Z = V - K S and pseudo values R."""
  X, x, decay, P = xs
  QS, KS = _into(jnp.stack([x.q, x.k]), decay) @ S
  R = X.of_sum(x.beta[:, None] * x.v, -x.beta[:, None] * KS)
  return _next_state(S, R, x, decay), (QS + P @ R, x.v - KS, R)


def state(S, xs):
  """Return S after the chunk, and S before it."""
  R, x, decay = xs
  return _next_state(S, R, x, decay), S


def before_scan(x, decay, dO):
  """Recompute the scores; return them and dO's gradients of R and of the state before."""
  G = _scores(jnp.stack([x.q, x.k]), x.k, decay)
  return G, (G[0].T @ dO, _into(x.q, decay).T @ dO)


def dstate(dS, xs):
  """Return dS of the state before the chunk; collect dS after it and dY, where Y = beta Z."""
  X, x, decay, (dR, dS_before) = xs
  k_out = x.k if decay is None else decay.out * x.k
  dY = X.T.of_sum(dR, k_out @ dS)
  dS_before = dS_before - _into(x.k, decay).T @ (x.beta[:, None] * dY)
  return dS_before + (dS if decay is None else decay.total * dS), (dS, dY)


def gradients(x, decay, G, states, dO, dstates):
  """Return (dq, dk, dv, dbeta, dg) of one chunk."""
  (S, Z, R), (dS, dY) = states, dstates
  F = jnp.stack([x.q, x.k])
  # F = [Q, K] again: D is the gradient of F S, E that of the scores G = F K^T.
  D = jnp.stack([dO, -dY])
  E = jnp.einsum("xiv,jv->xij", D, R) * _causal(R.shape[0], R.dtype)
  # A matmul with ones: as a reduction XLA:CPU takes 4% of forward and backward together.
  dbeta = ((dY * Z) @ jnp.ones((Z.shape[1], 1), Z.dtype))[:, 0] + (E[1] * G[1]).sum(axis=1)
  weight = jnp.stack([jnp.ones_like(x.beta), x.beta])[:, :, None]
  D, E = weight * D, weight * E
  dF_S, dk_S, carried = _into(D @ S.T, decay), R @ dS.T, None
  if decay is not None:
    dk_S = decay.out * dk_S
    carried = (decay.total * S * dS).sum(axis=1)
  dF, dk, dg = decays.score_gradients(x.g, F, x.k, decay, G, E, dF_S, dk_S, carried)
  return dF[0], dF[1] + dk, -D[1], dbeta, dg
