"""Public functions of decayed linear attention: argument checks, implementations and dispatch."""

from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import check_chunk, check_floating, check_inputs, check_shape
from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from deltanet_jax.ops.dtypes import matmul_precision_for, state_dtype
from deltanet_jax.ops.inputs import cast_all, initial_state, scaled_heads
from deltanet_jax.ops.linear_attention import chunkwise, reference
from deltanet_jax.ops.nonfinite import (
  has_nonfinite,
  nonfinite_reach,
  propagate_nonfinite,
  zero_nonfinite,
  zero_nonfinite_gate,
)
from deltanet_jax.ops.segments import number_segments
from pallas_kernels.delta_rule.checks import unsupported_reason


def linear_attention(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  v: Float[Array, "B L Hv dv"],
  *,
  g: Float[Array, "B L Hv"] | Float[Array, "B L Hv dk"] | None = None,
  h: Float[Array, "B L Hv dv"] | None = None,
  S0: Float[Array, "B Hv dk dv"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
  chunk: int = 64,
  implementation: str | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B L Hv dv"], Float[Array, "B Hv dk dv"]]:
  """Apply linear attention with decay to a sequence.

  S_t = exp(g_t) S_{t-1} exp(h_t) + k_t (x) v_t; o_t = scale q_t S_t.

  Args:
    q: Queries.
    k: Keys.
    v: Values. Hv is a multiple of H; value head j uses key head j // (Hv / H).
    g: Log decay (<= 0): a per-head (scalar) gate or a per-channel (vector) gate; None for no decay.
    h: Log decay (<= 0) per value channel.
    S0: State before the first token, zeros if None.
    segment_ids: Segments of packed sequences. The state is reset to zero wherever the id changes;
      S0 belongs to the first segment of a sequence, the returned S to the last.
    scale: Factor of the queries, usually dk**-0.5.
    chunk: Maximum chunk size of "chunkwise", a power of two; kernels choose their own.
    implementation: "recurrent" (the definition), "chunkwise" (scan over chunks), "pallas_tpu" or
      "pallas_gpu" (fused kernels). A named implementation runs or raises. None selects the fastest
      one that the target platform (see `compiling_for`) has for these inputs.
    interpret: Run a Pallas kernel in interpret mode on the CPU.

  Returns:
    o in v's dtype, and the last state S in float32 (float64 for float64 inputs).
  """
  check_inputs(q, k, v, g=g, S0=S0, segment_ids=segment_ids)
  if h is not None:
    check_shape("h", h, v.shape, "v's [B, L, Hv, dv]")
    check_floating(h=h)
  check_chunk(chunk)
  kernel_inputs = (*cast_all(v.dtype, q, k, v), g, h, S0)
  entry = LINEAR_ATTENTION.resolve(implementation, *kernel_inputs, interpret=interpret)
  inputs = LINEAR_ATTENTION.guard_forward_mode(entry, (q, k, v, g, h, S0))
  return entry.run(*inputs, segment_ids, float(scale), chunk, interpret)


def linear_attention_step(
  q_t: Float[Array, "B H dk"],
  k_t: Float[Array, "B H dk"],
  v_t: Float[Array, "B Hv dv"],
  S: Float[Array, "B Hv dk dv"],
  g_t: Float[Array, "B Hv"] | Float[Array, "B Hv dk"] | None = None,
  h_t: Float[Array, "B Hv dv"] | None = None,
  *,
  scale: float = 1.0,
  implementation: str | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"]]:
  """Apply linear attention to one decoding token, starting from state S.

  Arguments are those of `linear_attention`, without the length axis. All plain implementations
  share one step, the recurrence.
  """
  inputs = (*cast_all(v_t.dtype, q_t, k_t, v_t), g_t, h_t, S)
  entry = LINEAR_ATTENTION.resolve(implementation, *inputs, interpret=interpret)
  return entry.step(q_t, k_t, v_t, g_t, h_t, S, scale, interpret)


# Implementations: run(q, k, v, g, h, S0, segment_ids, scale, chunk, interpret), and
# step(q_t, k_t, v_t, g_t, h_t, S, scale, interpret).


def _prepare(q, k, v, g, h, S0, segment_ids, scale):
  """Cast to the state's dtype, repeat key heads, and number the segments."""
  B, _, _, dk = q.shape
  Hv, dv = v.shape[2:]
  dtype = state_dtype(q, k, v, g, h, S0)
  S0 = initial_state(S0, (B, Hv, dk, dv), dtype)
  q, k = scaled_heads(q, k, scale, Hv, dtype)
  return q, k, *cast_all(dtype, v, g, h), S0, number_segments(segment_ids)


def _recurrent(q, k, v, g, h, S0, segment_ids, scale, chunk, interpret):
  del chunk, interpret
  with matmul_precision_for(v.dtype):
    o, S = reference.recurrent(*_prepare(q, k, v, g, h, S0, segment_ids, scale))
  return o.astype(v.dtype), S


def _chunkwise(q, k, v, g, h, S0, segment_ids, scale, chunk, interpret):
  """Compute in chunks; non-finite tokens must not reach others of their chunk."""
  del interpret
  dtype = v.dtype
  q, k, v, g, h, S0, segments = _prepare(q, k, v, g, h, S0, segment_ids, scale)
  before = has_nonfinite(S0[:, None])[:, 0]
  bad = has_nonfinite(k, v, gate=g)
  if h is not None:
    bad |= has_nonfinite(gate=h)
  reached = nonfinite_reach(bad, segments, before=before)
  q_ok, k, v, S0 = map(zero_nonfinite, (q, k, v, S0))
  g, h = zero_nonfinite_gate(g), zero_nonfinite_gate(h)
  o, S = chunkwise.chunkwise(q_ok, k, v, g, h, S0, segments, chunk=chunk, input_dtype=dtype)
  o, S = propagate_nonfinite(o, S, reached, has_nonfinite(q))
  return o.astype(dtype), S


def _pallas_tpu(q, k, v, g, h, S0, segment_ids, scale, chunk, interpret):
  from pallas_kernels.linear_attention import linear_attention_tpu  # slow to import

  q, k = cast_all(v.dtype, q, k)
  return linear_attention_tpu(q, k, v, g, S0, segment_ids, scale=scale, interpret=interpret)


def _pallas_gpu(q, k, v, g, h, S0, segment_ids, scale, chunk, interpret):
  from pallas_kernels.linear_attention import linear_attention_gpu  # slow to import

  q, k = cast_all(v.dtype, q, k)
  return linear_attention_gpu(q, k, v, g, S0, segment_ids, scale=scale, interpret=interpret)


def _recurrent_step(q_t, k_t, v_t, g_t, h_t, S, scale, interpret):
  del interpret
  q, k, v, g, h = (None if x is None else x[:, None] for x in (q_t, k_t, v_t, g_t, h_t))
  o, S = linear_attention(q, k, v, g=g, h=h, S0=S, scale=scale, implementation="recurrent")
  return o[:, 0], S


def _pallas_tpu_step(q_t, k_t, v_t, g_t, h_t, S, scale, interpret):
  from pallas_kernels.linear_attention import linear_attention_step_tpu  # slow to import

  token = cast_all(v_t.dtype, q_t, k_t, v_t)
  return linear_attention_step_tpu(*token, S, g_t, scale=float(scale), interpret=interpret)


def _pallas_gpu_step(q_t, k_t, v_t, g_t, h_t, S, scale, interpret):
  from pallas_kernels.linear_attention import linear_attention_step_gpu  # slow to import

  token = cast_all(v_t.dtype, q_t, k_t, v_t)
  return linear_attention_step_gpu(*token, S, g_t, scale=float(scale), interpret=interpret)


def _kernel_reason(q, k, v, g, h, S0):
  if h is not None:
    return "a kernel has no decay of value channels, h must be None"
  return unsupported_reason(q, k, v, None, g, S0, channels=True)


LINEAR_ATTENTION = Operator(
  "linear_attention",
  {
    "pallas_tpu": Entry(
      run=_pallas_tpu,
      step=_pallas_tpu_step,
      default_on=("tpu",),
      unsupported_reason=_kernel_reason,
      interpretable=True,
      forward_mode=False,
    ),
    "pallas_gpu": Entry(
      run=_pallas_gpu,
      step=_pallas_gpu_step,
      default_on=("gpu",),
      unsupported_reason=_kernel_reason,
      interpretable=True,
      forward_mode=False,
    ),
    "chunkwise": Entry(run=_chunkwise, step=_recurrent_step, default_on=PLATFORMS),
    "recurrent": Entry(run=_recurrent, step=_recurrent_step),
  },
)
