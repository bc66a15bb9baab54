"""Decayed linear attention for users: checks, dtypes and the choice of implementation."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_implementation,
  check_inputs,
  check_shape,
)
from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.dtypes import matmul_precision_for, state_dtype
from deltanet_jax.ops.linear_attention import chunkwise, reference
from deltanet_jax.ops.nonfinite import (
  has_nonfinite,
  nonfinite_reach,
  propagate_nonfinite,
  zero_nonfinite,
  zero_nonfinite_gate,
)
from deltanet_jax.ops.segments import number_segments
from pallas_kernels.common.autodiff import reverse_only
from pallas_kernels.delta_rule.checks import unsupported_reason

Implementation = Literal["recurrent", "chunkwise", "pallas_tpu", "pallas_gpu"]
_FASTEST = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}  # by platform; elsewhere chunkwise
_KERNELS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}  # implementation -> end of its name
_NO_FORWARD_MODE = (
  "forward mode (jax.jvp, jax.hessian, jax.linearize) is for the implementations recurrent and"
  " chunkwise of linear_attention: its kernels have a backward by hand instead."
)


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
  implementation: Implementation | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B L Hv dv"], Float[Array, "B Hv dk dv"]]:
  """S_t = exp(g_t) S_{t-1} exp(h_t) + k_t (x) v_t; o_t = scale q_t S_t.

  Args:
    v: Hv is a multiple of H; value head j goes with key head j // (Hv / H).
    g: log decay (<= 0) per head, or per head and key channel.
    h: log decay (<= 0) per value channel.
    S0: state before the first token, zeros if None.
    segment_ids: segments packed into one row. The state starts from zero wherever the id
      changes; S0 belongs to the first segment of a row, the returned S to the last.
    chunk: largest chunk of the chunkwise form, a power of two; kernels have their own.
    implementation: "recurrent" is the definition, "chunkwise" a scan over chunks, "pallas_tpu" and
      "pallas_gpu" kernels. A named one runs or raises. None takes the fastest that the platform has
      for these inputs, this process's or the one named by `compiling_for`.
    interpret: runs the Pallas kernel on the CPU.

  Returns:
    o in v's dtype, and the last state S, float32 (float64 for float64 inputs).
  """
  check_inputs(q, k, v, g=g, S0=S0, segment_ids=segment_ids)
  if h is not None:
    check_shape("h", h, v.shape, "v's [B, L, Hv, dv]")
    check_floating(h=h)
  check_chunk(chunk)
  # Products are as exact as the values' dtype deserves, here by the dtype of all three.
  narrow = tuple(x.astype(v.dtype) for x in (q, k, v))
  implementation = _choose(implementation, interpret, *narrow, g, h, S0)
  if implementation in _KERNELS:
    options = dict(scale=float(scale), interpret=interpret)
    return _kernel(implementation, *narrow, g, S0, segment_ids, **options)
  B, _, H, dk = q.shape
  Hv, dv = v.shape[2:]
  dtype = state_dtype(q, k, v, g, h, S0)
  segments = None if segment_ids is None else number_segments(segment_ids)
  S0 = jnp.zeros((B, Hv, dk, dv), dtype) if S0 is None else S0.astype(dtype)
  q, k = (jnp.repeat(x.astype(dtype), Hv // H, axis=2) for x in (q * scale, k))
  v, g, h, given = *(None if x is None else x.astype(dtype) for x in (v, g, h)), v.dtype
  if implementation == "chunkwise":
    o, S = _chunkwise(q, k, v, g, h, S0, segments, chunk=chunk, given=given)
  else:
    with matmul_precision_for(given):
      o, S = reference.recurrent(q, k, v, g, h, S0, segments)
  return o.astype(given), S


def _unsupported_reason(q, k, v, g, h, S0):
  """Why kernels do not take these inputs; None if they do."""
  if h is not None:
    return 'a kernel has no decay of value channels, h must be None; use implementation="chunkwise"'
  return unsupported_reason(q, k, v, None, g, S0, channels=True)


def _choose(implementation, interpret, q, k, v, g, h, S0):
  """The implementation of this name, which takes these inputs; of no name, the fastest."""
  if implementation is not None:
    check_implementation(implementation, get_args(Implementation))
  if interpret and implementation not in _KERNELS:
    raise ValueError(
      f"interpret=True is for Pallas kernels, and implementation {implementation!r} is none."
    )
  name = implementation or _FASTEST.get(target_platform(), "chunkwise")
  reason = _unsupported_reason(q, k, v, g, h, S0) if name in _KERNELS else None
  if implementation is not None and reason:
    raise ValueError(reason)
  return "chunkwise" if reason else name


def _kernel(implementation, q, k, v, g, S0, segment_ids, **options):
  # Imported when it is called: it is heavy.
  from pallas_kernels import linear_attention as kernels

  inputs = reverse_only((q, k, v, g, S0), _NO_FORWARD_MODE)
  return getattr(kernels, f"linear_attention_{_KERNELS[implementation]}")(
    *inputs, segment_ids, **options
  )


def _chunkwise(q, k, v, g, h, S0, segments, **options):
  """In chunks, where tokens that are not finite would reach others of their chunk."""
  before = has_nonfinite(S0[:, None])[:, 0]
  bad = has_nonfinite(k, v, gate=g)
  if h is not None:
    bad |= has_nonfinite(gate=h)
  seen = nonfinite_reach(bad, segments, before=before)
  q_ok, k, v, S0 = map(zero_nonfinite, (q, k, v, S0))
  o, S = chunkwise.chunkwise(
    q_ok, k, v, zero_nonfinite_gate(g), zero_nonfinite_gate(h), S0, segments, **options
  )
  return propagate_nonfinite(o, S, seen, has_nonfinite(q))


def linear_attention_step(
  q_t: Float[Array, "B H dk"],
  k_t: Float[Array, "B H dk"],
  v_t: Float[Array, "B Hv dv"],
  S: Float[Array, "B Hv dk dv"],
  g_t: Float[Array, "B Hv"] | Float[Array, "B Hv dk"] | None = None,
  h_t: Float[Array, "B Hv dv"] | None = None,
  *,
  scale: float = 1.0,
  implementation: Implementation | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"]]:
  """One decoding token: `linear_attention` for L = 1 that continues from S.

  Only a kernel is another implementation here: of one token all plain forms are the recurrence.
  """
  token = (q_t, k_t, v_t)
  name = _choose(implementation, interpret, *(x.astype(v_t.dtype) for x in token), g_t, h_t, S)
  if name in _KERNELS:
    from pallas_kernels import linear_attention as kernels

    step = getattr(kernels, f"linear_attention_step_{_KERNELS[name]}")
    token = (x.astype(v_t.dtype) for x in token)
    return step(*token, S, g_t, scale=float(scale), interpret=interpret)
  q, k, v, g, h = (None if x is None else x[:, None] for x in (*token, g_t, h_t))
  o, S = linear_attention(q, k, v, g=g, h=h, S0=S, scale=scale, implementation="recurrent")
  return o[:, 0], S
