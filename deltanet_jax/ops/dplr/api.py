"""Public functions of the DPLR recurrence: argument checks, implementations and dispatch."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_inputs,
  check_qk,
  check_shape,
)
from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from deltanet_jax.ops.dplr import chunkwise, reference
from deltanet_jax.ops.dtypes import matmul_precision_for, state_dtype
from deltanet_jax.ops.inputs import cast_all, initial_state, scaled_heads
from deltanet_jax.ops.nonfinite import (
  has_nonfinite,
  nonfinite_reach,
  propagate_nonfinite,
  zero_nonfinite,
  zero_nonfinite_gate,
)
from deltanet_jax.ops.segments import number_segments, segment_starts


def dplr(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  v: Float[Array, "B L H dv"],
  a: Float[Array, "B L H dk"],
  b: Float[Array, "B L H dk"],
  *,
  g: Float[Array, "B L H"] | Float[Array, "B L H dk"] | None = None,
  S0: Float[Array, "B H dk dv"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
  chunk: int = 32,
  implementation: str | None = None,
) -> tuple[Float[Array, "B L H dv"], Float[Array, "B H dk dv"]]:
  """Apply a recurrence with a diagonal plus low rank (DPLR) transition to a sequence.

  S_t = exp(g_t) S_{t-1} - b_t (x) (a_t S_{t-1}) + k_t (x) v_t; o_t = scale q_t S_t.

  The paper writes the transition of the transposed state, D_t - a_t b_t^T. The caller must ensure
  that it contracts, for instance with b a small positive multiple of a. The delta rule is
  a = exp(g) k, b = beta k with beta v for v; linear attention is a = b = 0. q, k, v, a, b, g and S0
  are differentiable in reverse mode; forward mode (`jax.jvp`) needs implementation "recurrent".

  Args:
    q: Queries.
    k: Keys.
    v: Values.
    a: Vectors that read the state before the update.
    b: Vectors along which that reading is subtracted.
    g: Log decay (<= 0): a per-head (scalar) gate or a per-channel (vector) gate; None for no decay.
    S0: State before the first token, zeros if None.
    segment_ids: Segments of packed sequences. The state is reset to zero wherever the id changes;
      S0 belongs to the first segment of a sequence, the returned S to the last.
    scale: Factor of the queries.
    chunk: Maximum chunk size of "chunkwise", a power of two.
    implementation: "recurrent" (the definition) or "chunkwise"; None selects "chunkwise".

  Returns:
    o in v's dtype, and the last state S in float32 (float64 for float64 inputs).
  """
  check_qk(q, k)
  check_shape("v", v, (*q.shape[:3], *v.shape[3:]), "[B, L, H, dv]")
  check_inputs(q, k, v, g=g, S0=S0, segment_ids=segment_ids)
  for name, x in dict(a=a, b=b).items():
    check_shape(name, x, q.shape, "q's [B, L, H, dk]")
  check_floating(a=a, b=b)
  check_chunk(chunk)
  B, _, H, dk = q.shape
  S0 = initial_state(S0, (B, H, dk, v.shape[3]), state_dtype(q, k, v, a, b, g, S0))
  inputs = (q, k, v, a, b, g, S0)
  entry = DPLR.resolve(implementation, *inputs)
  inputs = DPLR.guard_forward_mode(entry, inputs)
  return entry.run(*inputs, segment_ids, float(scale), chunk)


def _recurrent(q, k, v, a, b, g, S0, segment_ids, scale, chunk):
  del chunk
  q, k = scaled_heads(q, k, scale, v.shape[2], S0.dtype)
  inputs = cast_all(S0.dtype, v, a, b, g)
  with matmul_precision_for(v.dtype):
    o, S = reference.recurrent(q, k, *inputs, S0, number_segments(segment_ids))
  return o.astype(v.dtype), S


def _chunkwise(q, k, v, a, b, g, S0, segment_ids, scale, chunk):
  segments = number_segments(segment_ids)
  bad, before = has_nonfinite(k, v, a, b, gate=g), has_nonfinite(S0[:, None])[:, 0]
  own = has_nonfinite(q)
  q, k, v, a, b, S0 = map(zero_nonfinite, (q, k, v, a, b, S0))
  if segment_ids is not None:
    # The first token of a segment has no previous state to read.
    a = jnp.where(segment_starts(segment_ids)[:, :, None, None], 0, a)
  options = dict(scale=scale, chunk=chunk)
  o, S = chunkwise.chunkwise(q, k, v, a, b, zero_nonfinite_gate(g), S0, segments, **options)
  return propagate_nonfinite(o, S, nonfinite_reach(bad, segments, before=before), own)


DPLR = Operator(
  "dplr",
  {
    "chunkwise": Entry(run=_chunkwise, default_on=PLATFORMS, forward_mode=False),
    "recurrent": Entry(run=_recurrent),
  },
)


def dplr_step(
  q_t: Float[Array, "B H dk"],
  k_t: Float[Array, "B H dk"],
  v_t: Float[Array, "B H dv"],
  a_t: Float[Array, "B H dk"],
  b_t: Float[Array, "B H dk"],
  S: Float[Array, "B H dk dv"],
  g_t: Float[Array, "B H"] | Float[Array, "B H dk"] | None = None,
  *,
  scale: float = 1.0,
) -> tuple[Float[Array, "B H dv"], Float[Array, "B H dk dv"]]:
  """Apply the DPLR recurrence to one decoding token, starting from state S.

  Arguments are those of `dplr`, without the length axis.
  """
  o, S = dplr(
    *(x[:, None] for x in (q_t, k_t, v_t, a_t, b_t)),
    g=None if g_t is None else g_t[:, None],
    S0=S,
    scale=scale,
    implementation="recurrent",
  )
  return o[:, 0], S
