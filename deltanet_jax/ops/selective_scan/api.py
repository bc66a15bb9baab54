"""Public function of the selective scan: argument checks, implementations and dispatch."""

from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_segment_ids,
  check_shape,
)
from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from deltanet_jax.ops.dtypes import state_dtype
from deltanet_jax.ops.inputs import initial_state
from deltanet_jax.ops.nonfinite import (
  has_nonfinite,
  nonfinite_reach,
  propagate_nonfinite,
  zero_nonfinite,
)
from deltanet_jax.ops.selective_scan import chunkwise, reference


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
  implementation: str | None = None,
) -> tuple[Float[Array, "B L D"], Float[Array, "B D N"]]:
  """Apply the selective state space recurrence of Mamba to a sequence.

  S_t = exp(dt_t A) S_{t-1} + dt_t u_t B_t per channel and state; y_t = S_t C_t + D u_t.

  The states `[B L D N]` are N times larger than the inputs. They are materialized for one chunk at
  a time, in the backward pass too.

  Args:
    u: Inputs.
    dt: Step sizes, >= 0.
    A: Decay rates, <= 0.
    B: Input projections of the states.
    C: Output projections of the states.
    D: Skip connection: factor of u in the output; None for none.
    S0: State before the first token, zeros if None.
    segment_ids: Segments of packed sequences. The state is reset to zero wherever the id changes;
      S0 belongs to the first segment of a sequence, the returned S to the last.
    chunk: Tokens whose states are materialized at a time, a power of two.
    implementation: "recurrent" (the definition) or "chunkwise" (inside chunks an associative scan,
      on a CPU a scan over tokens); None selects "chunkwise".

  Returns:
    y in u's dtype, and the last state S in float32 (float64 for float64 inputs).
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
  entry = SELECTIVE_SCAN.resolve(implementation)
  dtype = state_dtype(u, dt, A, B, C, S0)
  S0 = initial_state(S0, (batch, channels, N), dtype)
  # B and C keep their dtype until a chunk needs them.
  y, S = entry.run(u, dt.astype(dtype), A.astype(dtype), B, C, S0, segment_ids, chunk)
  if D is not None:
    y = y + D.astype(dtype)[None, None] * u.astype(dtype)
  return y.astype(u.dtype), S


def _recurrent(u, dt, A, B, C, S0, segment_ids, chunk):
  del chunk
  return reference.recurrent(u, dt, A, B, C, S0, segment_ids)


def _chunkwise(u, dt, A, B, C, S0, segment_ids, chunk):
  """Compute in chunks; non-finite tokens must not reach other segments of their chunk."""
  before = has_nonfinite(S0[:, None])[:, 0]
  reached = nonfinite_reach(has_nonfinite(u, dt, B[:, :, None]), segment_ids, before=before)
  u_dt, B_C_S0 = map(zero_nonfinite, (u, dt)), map(zero_nonfinite, (B, C, S0))
  y, S = chunkwise.chunkwise(*u_dt, A, *B_C_S0, segment_ids, chunk=chunk)
  return propagate_nonfinite(y, S, reached, has_nonfinite(C[:, :, None]))


SELECTIVE_SCAN = Operator(
  "selective_scan",
  {
    "chunkwise": Entry(run=_chunkwise, default_on=PLATFORMS),
    "recurrent": Entry(run=_recurrent),
  },
)
