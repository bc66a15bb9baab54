"""The selective scan for users: checks, dtypes and the choice of implementation."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_implementation,
  check_segment_ids,
  check_shape,
)
from deltanet_jax.ops.dtypes import state_dtype
from deltanet_jax.ops.nonfinite import (
  has_nonfinite,
  nonfinite_reach,
  propagate_nonfinite,
  zero_nonfinite,
)
from deltanet_jax.ops.selective_scan import chunkwise, reference

Implementation = Literal["recurrent", "chunkwise"]


def selective_scan(
  u: Float[Array, "B L D"],
  dt: Float[Array, "B L D"],
  A: Float[Array, "D N"],
  B: Float[Array, "B L N"],
  C: Float[Array, "B L N"],
  *,
  D: Float[Array, " D"] | None = None,
  S0: Float[Array, "B D N"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  chunk: int = 64,
  implementation: Implementation | None = None,
) -> tuple[Float[Array, "B L D"], Float[Array, "B D N"]]:
  """S_t = exp(dt_t A) S_{t-1} + dt_t u_t B_t per channel and state; y_t = S_t C_t + D u_t.

  The states `[B L D N]` are many times larger than inputs and outputs. They exist for one chunk at
  a time, in the backward too.

  Args:
    dt: step sizes, >= 0.
    A: decay rates, <= 0.
    D: how much of the input is added to the output, nothing if None.
    S0: state before the first token, zeros if None.
    segment_ids: segments packed into one row. The state starts from zero wherever the id
      changes; S0 belongs to the first segment of a row, the returned S to the last.
    chunk: tokens whose states exist at a time, a power of two.
    implementation: "recurrent" is the definition, "chunkwise" the default: inside chunks an
      associative scan, on a CPU token after token.

  Returns:
    y in u's dtype, and the last state S, float32 (float64 for float64 inputs).
  """
  if u.ndim != 3 or A.ndim != 2 or 0 in (*u.shape, *A.shape):
    raise ValueError(
      f"u, A have shapes {u.shape}, {A.shape}, expected non-empty [B, L, D] and [D, N]."
    )
  batch, L, channels = u.shape
  N = A.shape[1]
  check_shape("dt", dt, u.shape, "u's [B, L, D]")
  check_shape("A", A, (channels, N), "[D, N]")
  check_shape("B", B, (batch, L, N), "[B, L, N]")
  check_shape("C", C, (batch, L, N), "[B, L, N]")
  if D is not None:
    check_shape("D", D, (channels,), "[D]")
  if S0 is not None:
    check_shape("S0", S0, (batch, channels, N), "[B, D, N]")
  check_floating(u=u, dt=dt, A=A, B=B, C=C, D=D, S0=S0)
  check_segment_ids(segment_ids, (batch, L))
  check_chunk(chunk)
  implementation = implementation or "chunkwise"
  check_implementation(implementation, get_args(Implementation))
  dtype = state_dtype(u, dt, A, B, C, S0)
  S0 = jnp.zeros((batch, channels, N), dtype) if S0 is None else S0.astype(dtype)
  # B and C stay narrow until a chunk needs them.
  inputs = (u, dt.astype(dtype), A.astype(dtype), B, C, S0, segment_ids)
  if implementation == "chunkwise":
    y, S = _chunkwise(*inputs, chunk=chunk)
  else:
    y, S = reference.recurrent(*inputs)
  if D is not None:
    y = y + D.astype(dtype)[None, None] * u.astype(dtype)
  return y.astype(u.dtype), S


def _chunkwise(u, dt, A, B, C, S0, segment_ids, *, chunk):
  """In chunks, where tokens that are not finite would reach other segments of their chunk."""
  before = has_nonfinite(S0[:, None])[:, 0]
  seen = nonfinite_reach(has_nonfinite(u, dt, B[:, :, None]), segment_ids, before=before)
  u_dt, B_C_S0 = map(zero_nonfinite, (u, dt)), map(zero_nonfinite, (B, C, S0))
  y, S = chunkwise.chunkwise(*u_dt, A, *B_C_S0, segment_ids, chunk=chunk)
  return propagate_nonfinite(y, S, seen, has_nonfinite(C[:, :, None]))
