"""State of one head in on-chip memory, in key blocks: shared by the kernels that carry a state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.bf16 import parts_for
from pallas_kernels.delta_rule.pallas_gpu.decay import program_ids, scale_rows
from pallas_kernels.delta_rule.pallas_gpu.inverse import load_inverse, times_inverse_split
from pallas_kernels.delta_rule.pallas_gpu.matmul import F32, TN, dot


class StateProgram(NamedTuple):
  """Indices of one program, which carries the columns `cols` of one head's state."""

  b: jax.Array  # sequence
  h: jax.Array  # value head
  hk: jax.Array  # key head
  cols: pl.Slice  # value channels
  key_blocks: list[pl.Slice]  # key channels
  parts: int  # bfloat16 parts of a matmul operand

  def load_keys(self, k_ref, rows, once=True):
    """Return i -> K [C block_k] of key block i; a chunk needs each block twice.

    bfloat16 is loaded once: prefetching then takes half the shared memory, and two blocks fit on an
    SM instead of one. The parts of float32 would stay in registers and spill, as would more than
    two key blocks (heads of 256, which are not prefetched).
    """
    load = lambda i: k_ref[self.b, rows, self.hk, self.key_blocks[i]]
    if not once or k_ref.dtype == F32 or len(self.key_blocks) > 2:
      return load
    K = [load(i) for i in range(len(self.key_blocks))]
    return lambda i: K[i]

  def load_state(self, S_ref):
    """Return the key blocks [block_k block_v] of S [B Hv dk dv]; zeros if S_ref is None."""
    if S_ref is not None:
      return tuple(S_ref[self.b, self.h, keys, self.cols] for keys in self.key_blocks)
    return tuple(jnp.zeros((keys.size, self.cols.size), F32) for keys in self.key_blocks)

  def store_state(self, S_ref, S):
    for S_i, keys in zip(S, self.key_blocks):
      S_ref[self.b, self.h, keys, self.cols] = S_i

  def total_decays(self, n, decay, total_ref):
    """Return the decay of each key block over chunk n: None, a scalar, or a column per channel."""
    if total_ref is None:
      return [decay.total] * len(self.key_blocks)
    return [total_ref[n, self.b, self.h, keys][:, None] for keys in self.key_blocks]


def state_program(k_ref, group, block_k, block_v) -> StateProgram:
  j, h, b, hk = program_ids(group)
  cols = pl.ds(j * block_v, block_v)
  key_blocks = [pl.ds(i, block_k) for i in range(0, k_ref.shape[-1], block_k)]
  return StateProgram(b, h, hk, cols, key_blocks, parts_for(k_ref.dtype))


def written_values(V, KS, beta, decay, X_ref, at, parts):
  """Return R = X beta (V - e^b K S) of a chunk, which its tokens write, and R's residual.

  For linear attention (X_ref is None) R is V.
  """
  if X_ref is None:
    return V, None
  Y = (V.astype(F32) - scale_rows(KS, decay.start)) * beta[:, None]
  return times_inverse_split(load_inverse(X_ref, at), Y, parts)


def next_state(S, K, R, residual, decay, total, parts):
  """Return e^{b_C} S + K^T e^{b_C - b} R, in key blocks; K(i) is K [C block_k] of block i.

  A float32 R has at least two bfloat16 parts: with bfloat16 inputs its rounding limits S.
  """
  R_parts = max(parts, 2) if R.dtype == F32 else parts
  R, residual = (scale_rows(x, decay.end) for x in (R, residual))
  new = []
  for i, S_i in enumerate(S):
    decayed = S_i if total[i] is None else S_i * total[i]
    new.append(decayed + dot(K(i), R, R_parts, TN, residual))
  return tuple(new)
