"""The delta rule for users: checks, dtypes and the choice of implementation."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops import slot
from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_gate,
  check_implementation,
  check_inputs,
  check_qk,
  check_segment_ids,
)
from deltanet_jax.ops.delta_rule import chunkwise, parallel, recurrent
from deltanet_jax.ops.documents import number_documents
from deltanet_jax.ops.dtypes import products_for, state_dtype
from deltanet_jax.ops.slot import Slot
from pallas_kernels.tiling import MAX_KEY_SIZE, MAX_VALUE_SIZE

Implementation = Literal[
  "recurrent", "chunkwise", "parallel", "pallas_tpu", "pallas_gpu", "triton", "by_platform"
]
StepImplementation = Literal["recurrent", "pallas_tpu", "pallas_gpu", "by_platform"]
# What a platform runs if it is not told; the kernels' own limits are in `_kernel_serves`.
_BY_BACKEND = {"cpu": "chunkwise", "tpu": "pallas_tpu", "gpu": "pallas_gpu"}


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
  normalised here. Gradients flow to q, k, v, beta, g and S0, by reverse mode to any order.

  Args:
    v: Hv is a multiple of H; value head j goes with key head j // (Hv / H).
    g: log decay (<= 0) per head, or per head and key channel.
    S0: state before the first token, zeros if None.
    segment_ids: documents packed into one row. The state starts from zero wherever the id
      changes; S0 belongs to the first document of a row, the returned S to the last.
    chunk: largest chunk, a power of two; None is the implementation's best: 32 for head sizes up
      to 128 and 64 above in plain JAX, 64 on GPU, 128 on TPU.
    implementation: "recurrent" (a scan over tokens), "chunkwise" (a scan over
      chunks, products inside), "parallel" (L x L matrices), "pallas_tpu", "pallas_gpu" (fused
      kernels), "triton" (the paper's kernel through jax-triton). A named one runs or raises. None
      takes the fastest that this process's platform has for these inputs; "by_platform" leaves
      the same choice to the platform a program is lowered for (one at a time: Pallas of this
      version cannot be lowered for several at once), at the price of tracing them all.
    inverse_precision: how a kernel multiplies inside (I + A)^-1, "bf16", "bf16x3", "bf16x6" or
      "substitution"; None is exact to float32 for float32 inputs. Plain JAX is always exact.
    interpret: runs a Pallas kernel on the CPU; refused by implementations without one.

  Returns:
    o in v's dtype, and the last state S, float32 (float64 for float64 inputs).
  """
  check_inputs(q, k, v, beta=beta, g=g, S0=S0, segment_ids=segment_ids)
  check_chunk(chunk)
  B, _, H, dk = q.shape
  Hv, dv = v.shape[2:]
  primal = "fastest" if implementation is None and chunk is None else "chunks"
  if implementation is None:
    serves = _kernel_serves(q, k, v, g, S0)
    implementation = _BY_BACKEND.get(jax.default_backend(), "chunkwise") if serves else "chunkwise"
  check_implementation(implementation, get_args(Implementation))
  kernel = implementation in ("pallas_tpu", "pallas_gpu", "triton")
  if interpret and (not kernel or implementation == "triton"):
    raise ValueError(
      f"interpret=True is for Pallas kernels, and implementation {implementation!r} is none."
    )
  if inverse_precision is not None and not kernel:
    raise ValueError(
      f"inverse_precision={inverse_precision!r} is for kernels, and implementation"
      f" {implementation!r} always inverts exactly."
    )

  options = dict(g=g, S0=S0, segment_ids=segment_ids, scale=float(scale), chunk=chunk)
  if kernel:
    options |= dict(inverse_precision=inverse_precision, interpret=interpret)
    return _kernel(implementation, q, k, v, beta, **options)
  if implementation == "by_platform":
    return _by_platform(q, k, v, beta, **options)
  dtype = state_dtype(q, k, v, beta, g, S0)
  documents = None if segment_ids is None else number_documents(segment_ids)
  S0 = jnp.zeros((B, Hv, dk, dv), dtype) if S0 is None else S0.astype(dtype)
  if implementation == "chunkwise":
    options = dict(scale=float(scale), chunk=chunk, primal=primal)
    return chunkwise.chunkwise(q, k, v, beta, g, S0, documents, **options)
  form = recurrent.recurrent if implementation == "recurrent" else parallel.parallel
  q, k = (jnp.repeat(x.astype(dtype), Hv // H, axis=2) for x in (q * scale, k))
  g = None if g is None else g.astype(dtype)
  with products_for(v.dtype):
    o, S = form(q, k, v.astype(dtype), beta.astype(dtype), g, S0, documents)
  return o.astype(v.dtype), S


def _kernel_serves(q, k, v, g, S0):
  """Whether the kernels take these inputs: one dtype, bfloat16 or float32, no gate per channel."""
  narrow = q.dtype == k.dtype == v.dtype and v.dtype in (jnp.bfloat16, jnp.float32)
  wide = S0 is not None and S0.dtype == jnp.float64
  small = q.shape[3] <= MAX_KEY_SIZE and v.shape[3] <= MAX_VALUE_SIZE
  return narrow and not wide and small and (g is None or g.ndim == 3)


def _kernel(implementation, q, k, v, beta, *, interpret=False, **options):
  # Not at the top: plain JAX must not pay for kernels, and a broken import must be seen here.
  from pallas_kernels import delta_rule as kernels

  if implementation != "pallas_tpu":
    options["chunk"] = options["chunk"] or 64
  match implementation:
    case "pallas_tpu":
      return kernels.delta_rule_tpu(q, k, v, beta, **options, interpret=interpret)
    case "pallas_gpu":
      return kernels.delta_rule_gpu(q, k, v, beta, **options, interpret=interpret)
    case "triton":
      return kernels.delta_rule_triton(q, k, v, beta, **options)


def _by_platform(q, k, v, beta, **options):
  """Every platform's own implementation in one program; lowering keeps the one it is for."""
  arrays = {name: options.pop(name) for name in ("g", "S0", "segment_ids")}
  plain = lambda x, rest: delta_rule(*x, **rest, **options, implementation="chunkwise")
  if not _kernel_serves(q, k, v, arrays["g"], arrays["S0"]):
    return plain((q, k, v, beta), arrays)
  kernel = lambda name: lambda x, rest: _kernel(name, *x, **rest, **options)
  return lax.platform_dependent(
    (q, k, v, beta),
    arrays,
    tpu=kernel("pallas_tpu"),
    cuda=kernel("pallas_gpu"),
    default=plain,
  )


def delta_rule_step(
  q_t: Float[Array, "B H dk"],
  k_t: Float[Array, "B H dk"],
  v_t: Float[Array, "B Hv dv"],
  beta_t: Float[Array, "B Hv"],
  S: Float[Array, "B Hv dk dv"] | Slot,
  g_t: Float[Array, "B Hv"] | Float[Array, "B Hv dk"] | None = None,
  *,
  scale: float = 1.0,
  implementation: StepImplementation | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"] | Slot]:
  """One decoding token: `delta_rule` for L = 1 that continues from S.

  Args:
    S: the state, or the `Slot` of a stack of states; returned as it was given.
    implementation: "recurrent" in plain JAX, differentiable, or a fused kernel, for decoding only,
      that reads and writes the state once. None is the kernel of this process's platform, if any;
      "by_platform" that of the platform a program is lowered for.
  """
  serves = _kernel_serves(*(x[:, None] for x in (q_t, k_t, v_t)), None, S)
  serves = serves and (g_t is None or g_t.ndim == 2)
  if implementation is None:
    kernels = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"} if serves else {}
    implementation = kernels.get(jax.default_backend(), "recurrent")
  check_implementation(implementation, get_args(StepImplementation))
  if interpret and implementation not in ("pallas_tpu", "pallas_gpu"):
    raise ValueError(
      f"interpret=True is for Pallas kernels, and implementation {implementation!r} is none."
    )
  run = lambda name: functools.partial(_step, name, scale=float(scale), interpret=interpret)
  inputs = (q_t, k_t, v_t, beta_t), S, g_t
  if implementation != "by_platform":
    return run(implementation)(*inputs)
  if not serves:
    return run("recurrent")(*inputs)
  return lax.platform_dependent(
    *inputs, tpu=run("pallas_tpu"), cuda=run("pallas_gpu"), default=run("recurrent")
  )


def _step(implementation, token, S, g_t, *, scale, interpret):
  if implementation == "recurrent":
    o, new = delta_rule(
      *(x[:, None] for x in token),
      g=None if g_t is None else g_t[:, None],
      S0=slot.read(S),
      scale=scale,
      implementation="recurrent",
    )
    return o[:, 0], slot.write(S, new)
  from pallas_kernels import delta_rule as kernels

  by_name = dict(pallas_tpu=kernels.delta_rule_step_tpu, pallas_gpu=kernels.delta_rule_step_gpu)
  step = functools.partial(by_name[implementation], scale=scale, interpret=interpret)
  if not isinstance(S, Slot):
    return step(*token, S, g_t)
  o, stack = step(*token, S.stack, g_t, layer=S.layer)
  return o, Slot(stack, S.layer)


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
  documents = None if segment_ids is None else number_documents(segment_ids)
  q, k = (jnp.repeat(x.astype(dtype), Hv // H, axis=2) for x in (q * scale, k))
  g = None if g is None else g.astype(dtype)
  with products_for(k.dtype):
    return parallel.attention(q, k, beta.astype(dtype), g, documents)
