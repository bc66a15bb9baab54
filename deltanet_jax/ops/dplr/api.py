"""The DPLR recurrence for users: checks, dtypes and the choice of implementation."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_implementation,
  check_inputs,
  check_qk,
  check_shape,
)
from deltanet_jax.ops.dplr import chunkwise, reference
from deltanet_jax.ops.dtypes import matmul_precision_for, state_dtype
from deltanet_jax.ops.nonfinite import (
  has_nonfinite,
  nonfinite_reach,
  propagate_nonfinite,
  zero_nonfinite,
  zero_nonfinite_gate,
)
from deltanet_jax.ops.segments import number_segments, segment_starts
from pallas_kernels.common.autodiff import reverse_only
from pallas_kernels.delta_rule.checks import NO_FORWARD_MODE

Implementation = Literal["recurrent", "chunkwise"]


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
  implementation: Implementation | None = None,
) -> tuple[Float[Array, "B L H dv"], Float[Array, "B H dk dv"]]:
  """S_t = exp(g_t) S_{t-1} - b_t (x) (a_t S_{t-1}) + k_t (x) v_t; o_t = scale q_t S_t.

  The paper writes the transition of the transposed state, D_t - a_t b_t^T. Whether it contracts is
  the caller's business: b a positive multiple of a, small enough, is one way. The delta rule
  is a = exp(g) k, b = beta k with beta v for v; linear attention is a = b = 0. Gradients flow to
  q, k, v, a, b, g and S0, by reverse mode; forward mode (jvp) is for "recurrent".

  Args:
    g: log decay (<= 0) per head, or per head and key channel.
    S0: state before the first token, zeros if None.
    segment_ids: segments packed into one row. The state starts from zero wherever the id
      changes; S0 belongs to the first segment of a row, the returned S to the last.
    chunk: largest chunk of the chunkwise form, a power of two.
    implementation: "recurrent" is the definition, "chunkwise" the default.

  Returns:
    o in v's dtype, and the last state S, float32 (float64 for float64 inputs).
  """
  check_qk(q, k)
  check_shape("v", v, (*q.shape[:3], *v.shape[3:]), "[B, L, H, dv]")
  check_inputs(q, k, v, g=g, S0=S0, segment_ids=segment_ids)
  for name, x in dict(a=a, b=b).items():
    check_shape(name, x, q.shape, "q's [B, L, H, dk]")
  check_floating(a=a, b=b)
  check_chunk(chunk)
  implementation = implementation or "chunkwise"
  check_implementation(implementation, get_args(Implementation))
  B, _, H, dk = q.shape
  dtype = state_dtype(q, k, v, a, b, g, S0)
  segments = None if segment_ids is None else number_segments(segment_ids)
  S0 = jnp.zeros((B, H, dk, v.shape[3]), dtype) if S0 is None else S0.astype(dtype)
  if implementation == "chunkwise":
    q, k, v, a, b, g, S0 = reverse_only((q, k, v, a, b, g, S0), NO_FORWARD_MODE)
    bad, before = has_nonfinite(k, v, a, b, gate=g), has_nonfinite(S0[:, None])[:, 0]
    own = has_nonfinite(q)
    q, k, v, a, b, S0 = map(zero_nonfinite, (q, k, v, a, b, S0))
    if segment_ids is not None:
      # A segment's first token has no state before it to read.
      a = jnp.where(segment_starts(segment_ids)[:, :, None, None], 0, a)
    options = dict(scale=float(scale), chunk=chunk)
    o, S = chunkwise.chunkwise(q, k, v, a, b, zero_nonfinite_gate(g), S0, segments, **options)
    return propagate_nonfinite(o, S, nonfinite_reach(bad, segments, before=before), own)
  q, k, wide_v, a, b = (x.astype(dtype) for x in (q * scale, k, v, a, b))
  g = None if g is None else g.astype(dtype)
  with matmul_precision_for(v.dtype):
    o, S = reference.recurrent(q, k, wide_v, a, b, g, S0, segments)
  return o.astype(v.dtype), S


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
  """One decoding token: `dplr` for L = 1 that continues from S."""
  o, S = dplr(
    *(x[:, None] for x in (q_t, k_t, v_t, a_t, b_t)),
    g=None if g_t is None else g_t[:, None],
    S0=S,
    scale=scale,
    implementation="recurrent",
  )
  return o[:, 0], S
