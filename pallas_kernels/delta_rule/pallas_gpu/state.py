"""The state of a head on chip, in blocks of keys: what the forward and its recomputation share."""

import jax.numpy as jnp

from pallas_kernels.delta_rule.pallas_gpu.chunk import scale_rows
from pallas_kernels.delta_rule.pallas_gpu.inverse import load_inverse, times_inverse_split
from pallas_kernels.delta_rule.pallas_gpu.products import F32, TN, dot


def first_state(S0_refs, b, h, key_blocks, cols):
  """The blocks [block_k block_v] of S0 [B Hv dk dv], or zeros if there is none."""
  if S0_refs:
    (S0_ref,) = S0_refs
    return tuple(S0_ref[b, h, keys, cols] for keys in key_blocks)
  return tuple(jnp.zeros((keys.size, cols.size), F32) for keys in key_blocks)


def writes(V, KS, beta, decay, X_ref, at, parts):
  """R = X beta (V - e^b K S) of a chunk, what its tokens write, and a rest below R's last digit."""
  Y = (V - scale_rows(KS, decay.start)) * beta[:, None]
  return times_inverse_split(load_inverse(X_ref, at), Y, parts)


def next_state(S, K, key_blocks, R, rest, decay, parts):
  """e^{b_C} S + K^T e^{b_C - b} R; K gives the keys [C block_k] of a block."""
  R, rest = (scale_rows(x, decay.end) for x in (R, rest))
  new = []
  for S_i, keys in zip(S, key_blocks):
    kept = S_i if decay.whole is None else S_i * decay.whole
    new.append(kept + dot(K(keys), R, parts, TN, rest))
  return tuple(new)
