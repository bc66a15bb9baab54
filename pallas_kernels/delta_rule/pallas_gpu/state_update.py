"""The state of a head on chip, in blocks of keys: what the forward and its recomputation share."""

import jax.numpy as jnp

from pallas_kernels.delta_rule.pallas_gpu.decay import scale_rows
from pallas_kernels.delta_rule.pallas_gpu.inverse import load_inverse, times_inverse_split
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, TN, dot


def first_state(S0_refs, b, h, key_blocks, cols):
  """The blocks [block_k block_v] of S0 [B Hv dk dv], or zeros if there is none."""
  if S0_refs:
    (S0_ref,) = S0_refs
    return tuple(S0_ref[b, h, keys, cols] for keys in key_blocks)
  return tuple(jnp.zeros((keys.size, cols.size), F32) for keys in key_blocks)


def writes(V, KS, beta, decay, X_ref, at, parts):
  """R = X beta (V - e^b K S) of a chunk, what its tokens write, and a rest below R's last digit.

  Of linear attention, X_ref None, R is V.
  """
  if X_ref is None:
    return V, None
  Y = (V.astype(F32) - scale_rows(KS, decay.start)) * beta[:, None]
  return times_inverse_split(load_inverse(X_ref, at), Y, parts)


def load_keys(k_ref, at, key_blocks, once=True):
  """i -> K [C block_k] of key block i, which a chunk needs twice.

  bfloat16 is read once, half of what loading ahead keeps in shared memory: two blocks fit on a core
  where it would be one. The parts of float32 would stay in registers, and spill, as would more than
  two blocks (heads of 256, of which nothing is loaded ahead).
  """
  load = lambda i: k_ref[*at, key_blocks[i]]
  if not once or k_ref.dtype == F32 or len(key_blocks) > 2:
    return load
  K = [load(i) for i in range(len(key_blocks))]
  return lambda i: K[i]


def load_whole(decay, whole_ref, at, key_blocks):
  """What a chunk leaves of each block of a state: None for all, a number, of channels a column."""
  if whole_ref is None:
    return [decay.whole] * len(key_blocks)
  return [whole_ref[*at, keys][:, None] for keys in key_blocks]


def next_state(S, K, R, rest, decay, whole, parts):
  """e^{b_C} S + K^T e^{b_C - b} R; S in blocks of keys, K(i) the keys [C block_k] of one.

  An R of float32 has two bfloat16 parts at least: of bfloat16 inputs its rounding is what limits S.
  """
  wide = max(parts, 2) if R.dtype == F32 else parts
  R, rest = (scale_rows(x, decay.end) for x in (R, rest))
  new = []
  for i, S_i in enumerate(S):
    kept = S_i if whole[i] is None else S_i * whole[i]
    new.append(kept + dot(K(i), R, wide, TN, rest))
  return tuple(new)
