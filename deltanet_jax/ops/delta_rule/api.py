"""The delta rule for users: checks, dtypes and the choice of implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_gate,
  check_implementation,
  check_inputs,
  check_qk,
  check_segment_ids,
  check_token,
)
from deltanet_jax.ops.delta_rule import parallel
from deltanet_jax.ops.delta_rule.implementations import FORMS, Implementation, fastest
from deltanet_jax.ops.dtypes import matmul_precision_for, state_dtype
from deltanet_jax.ops.layer_state import LayerState
from deltanet_jax.ops.segments import number_segments
from pallas_kernels.common.autodiff import reverse_only
from pallas_kernels.delta_rule.checks import NO_FORWARD_MODE

# Forms without a backward by hand.
_FORWARD_MODE = ("recurrent", "parallel")


def delta_rule(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  v: Float[Array, "B L Hv dv"],
  beta: Float[Array, "B L Hv"],
  *,
  g: Float[Array, "B L Hv"] | Float[Array, "B L Hv dk"] | None = None,
  S0: Float[Array, "B Hv dk dv"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
  chunk: int | None = None,
  implementation: Implementation | None = None,
  inverse_precision: str | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B L Hv dv"], Float[Array, "B Hv dk dv"]]:
  """S_t = S' + k_t (x) beta_t (v_t - k_t S'), S' = exp(g_t) S_{t-1}; o_t = scale q_t S_t.

  Keys should have norm 1 and beta lie in (0, 1), or (0, 2) for negative eigenvalues; nothing is
  normalised here. Gradients flow to q, k, v, beta, g and S0, by reverse mode to any order; forward
  mode (jvp) is for "recurrent" and "parallel".

  Args:
    v: Hv is a multiple of H; value head j goes with key head j // (Hv / H).
    g: log decay (<= 0) per head, or per head and key channel.
    S0: state before the first token, zeros if None.
    segment_ids: segments packed into one row. The state starts from zero wherever the id
      changes; S0 belongs to the first segment of a row, the returned S to the last.
    chunk: largest chunk, a power of two; None is the implementation's best: 32 for head sizes up
      to 128 and 64 above in plain JAX, 64 on GPU, 128 on TPU.
    implementation: "recurrent" (a scan over tokens), "chunkwise" (a scan over
      chunks, products inside), "parallel" (L x L matrices), "pallas_tpu", "pallas_gpu" (fused
      kernels), "triton" (the paper's kernel through jax-triton). A named one runs or raises. None
      takes the fastest that the platform has for these inputs, this process's or the one named
      by `compiling_for`; "by_platform" leaves the same choice to lowering (for one platform at a
      time, as Pallas demands), at the price of tracing them all.
    inverse_precision: how a kernel multiplies inside (I + A)^-1, "bf16", "bf16x3", "bf16x6" or
      "substitution"; None is exact to float32 for float32 inputs. Plain JAX is always exact.
    interpret: runs a Pallas kernel on the CPU; refused by implementations without one.

  Returns:
    o in v's dtype, and the last state S, float32 (float64 for float64 inputs).
  """
  check_inputs(q, k, v, beta=beta, g=g, S0=S0, segment_ids=segment_ids)
  check_chunk(chunk)
  form = _form(implementation, interpret) or fastest(q, k, v, beta, g, S0)
  options = dict(scale=float(scale), chunk=chunk)
  if form.kernel:
    options["inverse_precision"] = inverse_precision
  elif inverse_precision is not None:
    raise ValueError(
      f"inverse_precision={inverse_precision!r} is for kernels, and implementation"
      f" {implementation!r} always inverts exactly."
    )
  if interpret:
    options["interpret"] = True
  inputs = (q, k, v, beta, g, S0)
  if implementation not in _FORWARD_MODE:
    inputs = reverse_only(inputs, NO_FORWARD_MODE)
  return form.run(*inputs, segment_ids, **options)


def _form(implementation, interpret):
  """The form of this name, None for no name."""
  if implementation is not None:
    check_implementation(implementation, FORMS)
  form = FORMS.get(implementation)
  if interpret and not (form and form.interprets):
    raise ValueError(
      f"interpret=True is for Pallas kernels, and implementation {implementation!r} is none."
    )
  return form


def delta_rule_step(
  q_t: Float[Array, "B H dk"],
  k_t: Float[Array, "B H dk"],
  v_t: Float[Array, "B Hv dv"],
  beta_t: Float[Array, "B Hv"],
  S: Float[Array, "B Hv dk dv"] | LayerState,
  g_t: Float[Array, "B Hv"] | Float[Array, "B Hv dk"] | None = None,
  *,
  scale: float = 1.0,
  implementation: Implementation | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"] | LayerState]:
  """One decoding token: `delta_rule` for L = 1 that continues from S.

  Args:
    S: the state, or the `LayerState` of a stack of states; returned as it was given.
    implementation: as of `delta_rule`. Plain forms share one step in JAX, differentiable; a
      kernel's, for decoding only, reads and writes the state once.
  """
  check_token(q_t, k_t, v_t)
  form = _form(implementation, interpret) or fastest(q_t, k_t, v_t, beta_t, g_t, S)
  options = dict(scale=float(scale), interpret=True) if interpret else dict(scale=float(scale))
  return form.step((q_t, k_t, v_t, beta_t), S, g_t, **options)


def delta_rule_attention(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  beta: Float[Array, "B L Hv"],
  *,
  g: Float[Array, "B L Hv"] | Float[Array, "B L Hv dk"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
) -> Float[Array, "B Hv L L"]:
  """The L x L matrix A of the fully parallel form: o = A v where the state starts from zero."""
  check_qk(q, k)
  B, L, H, dk = q.shape
  if beta.ndim != 3 or beta.shape[:2] != (B, L) or beta.shape[2] % H or beta.shape[2] == 0:
    raise ValueError(
      f"beta has shape {beta.shape}, expected [B, L, Hv] = [{B}, {L}, a multiple of {H}]."
    )
  Hv = beta.shape[2]
  check_gate(g, (B, L, Hv, dk))
  check_floating(q=q, k=k, beta=beta, g=g)
  check_segment_ids(segment_ids, (B, L))
  dtype = state_dtype(q, k, beta, g)
  segments = None if segment_ids is None else number_segments(segment_ids)
  q, k = (jnp.repeat(x.astype(dtype), Hv // H, axis=2) for x in (q * scale, k))
  g = None if g is None else g.astype(dtype)
  with matmul_precision_for(k.dtype):
    return parallel.attention(q, k, beta.astype(dtype), g, segments)
