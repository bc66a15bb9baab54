"""Decay factors and masked scores of one chunk: forget gates and segment boundaries.

All functions are for one head and one chunk of C tokens; callers `vmap`. Every exponent is <= 0, so
strong gates underflow to 0 and nothing overflows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# exp(-104) is 0 in float32, so clamping stronger gates changes nothing, and sums over a chunk stay
# small enough for the exact part of `_cumulative`.
_MIN_LOG_DECAY = -104.0
# Gates are summed as multiples of 2^-10 (exact in float32 up to 2^14 = 128 tokens of the strongest
# gate) plus a remainder below 2^-11: with one float32 sum near -1000, differences of neighbouring
# tokens would have an absolute error of 1e-4, hence their decay that relative error.
_GRID = 2.0**10
# Block size below which scores are computed as dense sums.
_DENSE = 4


class Decay(NamedTuple):
  """Decay of rows and of the carried state within one chunk; factors in [0, 1].

  The trailing axis is 1 for a per-head gate, dk for a per-channel gate, and dv for a decay of value
  channels.
  """

  into: jax.Array  # [C ·]: of the carried state at row i
  out: jax.Array  # [C ·]: of row i at the end of the chunk
  total: jax.Array  # [· 1]: of the carried state at the end of the chunk
  hi: jax.Array | None  # [C ·]: cumulative log decay up to row i, exact part
  lo: jax.Array | None  # [C ·]: its remainder
  same: jax.Array | None  # [C C]: 1 where rows i and j are in one segment


def chunk_decay(g, segments, carried_segment, dtype) -> Decay | None:
  """Compute the decay factors of one chunk from its log decays and segment numbers.

  Args:
    g: Per-head gate `[C]`, per-channel gate `[C dk]`, or None.
    segments: `[C]` segment number of each row, or None.
    carried_segment: Segment number of the carried state.
  """
  if g is None and segments is None:
    return None
  hi = lo = same = None
  into = out = total = jnp.ones((1, 1), dtype)
  if g is not None:
    hi, lo = _cumulative(g[:, None] if g.ndim == 1 else g)
    into = jnp.exp(hi) * jnp.exp(lo)
    out = jnp.exp((hi[-1:] - hi) + (lo[-1:] - lo))
    total = into[-1][:, None]
  if segments is not None:
    same = (segments[:, None] == segments[None, :]).astype(dtype)
    into = into * (segments == carried_segment).astype(dtype)[:, None]
    out = out * same[-1][:, None]
    total = total * (segments[-1] == carried_segment).astype(dtype)
  return Decay(into, out, total, hi, lo, same)


def _cumulative(g):
  g = jnp.maximum(g, _MIN_LOG_DECAY)
  coarse = jnp.round(g * _GRID) / _GRID
  # Cumulative sums as matmuls: XLA fuses a `cumsum` into every consumer and compiles for minutes.
  upto = jnp.asarray(np.tril(np.ones((g.shape[0],) * 2)), g.dtype)
  with jax.default_matmul_precision("highest"):
    return upto @ coarse, upto @ (g - coarse)


def _difference(hi_i, lo_i, hi_j, lo_j, keep):
  """Log decay from row j to row i where `keep`, else 0; masked before `exp` is applied."""
  return jnp.where(keep, (hi_i - hi_j) + (lo_i - lo_j), 0)


def scores(F, K, decay: Decay | None, mask):
  """Compute masked, decayed scores sum_c F_ic K_jc exp(b_ic - b_jc) within segments.

  b is the cumulative log decay.

  Args:
    F: `[X C dk]`, X stacked kinds of rows against one set of keys.
    K: `[C dk]`.
    mask: `[X C C]`, which pairs (i, j) count, none above the diagonal.
  """
  if decay is None:
    return jnp.einsum("xid,jd->xij", F, K) * mask
  if decay.same is not None:
    mask = mask * decay.same[None]
  if decay.hi is None:
    return jnp.einsum("xid,jd->xij", F, K) * mask
  if decay.hi.shape[1] > 1:
    return _vector_scores(F, K, decay) * mask
  hi, lo = decay.hi, decay.lo
  log_pair = _difference(hi, lo, hi.T, lo.T, np.tril(np.ones((K.shape[0],) * 2, bool)))
  return jnp.einsum("xid,jd->xij", F, K) * (jnp.exp(log_pair)[None] * mask)


def _vector_scores(F, K, decay):
  """Scores with a per-channel gate, by recursive halving.

  The smallest blocks are dense sums. Above, rows of a block's second half see keys of its first
  half by the factors exp(b_i - z) and exp(z - b_j), both <= 1 with z = b at the first row of the
  second half, so that a level is one matmul. A level takes one exponential per row and channel, a
  dense sum one per pair of rows and channel.
  """
  C, dk = K.shape
  s = min(_DENSE, C)
  padded = s << (-(-C // s) - 1).bit_length()

  def split(x, s, mode="constant"):
    """[.. C dk] to [.. n s dk]."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, padded - x.shape[-2]), (0, 0)], mode=mode)
    return x.reshape(*x.shape[:-2], padded // s, s, dk)

  hi, lo = split(decay.hi, s, "edge"), split(decay.lo, s, "edge")
  below = np.tril(np.ones((s, s), bool))[None, :, :, None]
  inner = jnp.exp(_difference(hi[:, :, None], lo[:, :, None], hi[:, None], lo[:, None], below))
  keys = split(K, s)[:, None] * inner  # [n s s dk]
  G = jnp.einsum("xnid,nijd->xnij", split(F, s), keys)
  while s < padded:
    halves = lambda x, mode="constant": split(x, s, mode).reshape(*x.shape[:-2], -1, 2, s, dk)
    hi, lo = halves(decay.hi, "edge"), halves(decay.lo, "edge")
    hi_z, lo_z = hi[:, 1, :1], lo[:, 1, :1]
    from_pivot = jnp.exp((hi[:, 1] - hi_z) + (lo[:, 1] - lo_z))
    to_pivot = jnp.exp((hi_z - hi[:, 0]) + (lo_z - lo[:, 0]))
    rows, keys = halves(F)[:, :, 1] * from_pivot[None], halves(K)[:, 0] * to_pivot
    low = jnp.einsum("xnid,njd->xnij", rows, keys)
    upper = jnp.concatenate([G[:, ::2], jnp.zeros_like(low)], axis=3)
    G = jnp.concatenate([upper, jnp.concatenate([low, G[:, 1::2]], axis=3)], axis=2)
    s *= 2
  return G[:, 0, :C, :C]


def read(P, V, decay: Decay | None):
  """Compute sum_j P_ij V_jc exp(b_ic - b_jc): read values `[C dv]` that decay per channel.

  Args:
    P: `[X C C]`, zero above the diagonal.
  """
  if decay is None:
    return jnp.einsum("xij,jd->xid", P, V)
  # The transpose of `scores` in F: it has the same factors, none of them above 1.
  F = jax.ShapeDtypeStruct((P.shape[0], *V.shape), V.dtype)
  (O,) = jax.linear_transpose(lambda F: scores(F, V, decay, jnp.ones_like(P)), F)(P)
  return O


def score_gradients(g, F, K, decay: Decay | None, G, E, dF_S, dK_S, carried):
  """Return (dF, dK, dg) of one chunk.

  g_s affects everything that passes from before token s to token s or later.

  Args:
    g: `[C]`, `[C dk]` or None.
    G, E: Scores `[X C C]` and their gradient; E is zero where `scores` was masked.
    dF_S, dK_S: Gradients of F and K through the carried state (rows read it, keys write it).
    carried: `[dk]`, the gradient through the decay of the carried state itself.
  """
  # Scores are linear in F and in K, so this does not recompute them.
  _, pull = jax.vjp(lambda F, K: scores(F, K, decay, jnp.ones_like(G)), F, K)
  if g is None:
    dF, dK = pull(E)
    return dF + dF_S, dK + dK_S, None
  lower = np.tril(np.ones((K.shape[0],) * 2))
  strict = jnp.asarray(np.tril(lower, -1), K.dtype)
  since = jnp.asarray(lower.T, K.dtype)  # since[s, i] = 1 for i >= s
  reads, writes = (F * dF_S).sum(axis=0), K * dK_S
  if g.ndim == 1:
    # Sum over exactly the pairs j < s <= i: no large terms that would have to cancel.
    dF, dK = pull(E)
    pairs = ((since @ ((G * E).sum(axis=0) * strict)) * strict).sum(axis=1)
    reads, writes, carried = reads.sum(axis=1), writes.sum(axis=1), carried.sum()
  else:
    # The diagonal (a token's own score) does not decay; including it would swamp weak gradients.
    dF, dK = pull(E * strict[None])
    pairs = since @ ((F * dF).sum(axis=0) - K * dK)
    own = jnp.diagonal(E, axis1=1, axis2=2)[:, :, None]
    dF, dK = dF + own * K[None], dK + (own * F).sum(axis=0)
    carried = carried[None]
  return dF + dF_S, dK + dK_S, pairs + since @ reads + strict @ writes + carried
