"""Public function of causal softmax attention on sequences: checks, implementations, dispatch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.attention.xla import masked_attention, portable_implementation
from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from deltanet_jax.ops.segments import number_segments
from pallas_kernels.attention.checks import unsupported_reason


def causal_attention(
  q: Float[Array, "B L H d"],
  k: Float[Array, "B L Hk d"],
  v: Float[Array, "B L Hk d"],
  *,
  window: int | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  implementation: str | None = None,
  interpret: bool = False,
) -> Float[Array, "B L H d"]:
  """Apply causal softmax attention to a sequence, optionally with a sliding window.

  o = softmax(q k^T / sqrt(d)) v over the tokens of the same segment up to the current one.

  Args:
    q: Queries.
    k: Keys. H is a multiple of Hk (grouped-query attention).
    v: Values.
    window: Number of keys that a token sees, including its own; None for all.
    segment_ids: Segments of packed sequences; a segment does not see any other.
    implementation: "plain" (matmuls and softmax in the inputs' dtype, at least float32), "xla" or
      "cudnn" (`jax.nn.dot_product_attention`), "pallas_tpu" or "pallas_gpu" (our fused kernels). A
      named implementation runs or raises. None selects, for half precision, pallas_tpu on a TPU and
      cudnn on a GPU, or pallas_gpu for packed sequences and where no GPU is present whose cuDNN
      could be queried. Otherwise it selects xla for float32 and plain for the rest: xla rounds
      float64 to float32, and its bfloat16 gradient mixes dtypes, which strict promotion forbids.
    interpret: Run a Pallas kernel in interpret mode on the CPU.

  Returns:
    o in q's dtype.
  """
  if q.ndim != 4 or 0 in q.shape:
    raise ValueError(f"q has shape {q.shape}, expected non-empty [B, L, H, d].")
  if window is not None and window < 1:
    raise ValueError(f"window is {window}, expected at least 1 key, the token's own.")
  entry = CAUSAL_ATTENTION.resolve(implementation, q, k, v, segment_ids, interpret=interpret)
  return entry.run(q, k, v, number_segments(segment_ids), window, interpret)


def _run_xla(q, k, v, segments, window, interpret, *, implementation):
  del interpret
  return masked_attention(q, k, v, segments, window, implementation)


def _pallas_tpu(q, k, v, segments, window, interpret):
  from pallas_kernels.attention import attention_tpu  # slow to import

  return attention_tpu(q, k, v, segments, window=window, interpret=interpret)


def _pallas_gpu(q, k, v, segments, window, interpret):
  from pallas_kernels.attention import attention_gpu  # slow to import

  return attention_gpu(q, k, v, segments, window=window, interpret=interpret)


def _cudnn_is_default(q, k, v, segment_ids):
  """Whether cuDNN computes these inputs, forward and backward: JAX rejects odd lengths."""
  # Not only `target_platform`: JAX queries the version of the installed cuDNN while tracing.
  if jax.default_backend() != "gpu" or segment_ids is not None:
    return False
  half = q.dtype in (jnp.bfloat16, jnp.float16)
  return half and q.shape[1] % 2 == 0 and q.shape[3] % 8 == 0 and q.shape[3] <= 128


CAUSAL_ATTENTION = Operator(
  "causal_attention",
  {
    "pallas_tpu": Entry(
      run=_pallas_tpu,
      default_on=("tpu",),
      unsupported_reason=lambda q, k, v, segment_ids: unsupported_reason("pallas_tpu", q, k, v),
      interpretable=True,
      forward_mode=False,
    ),
    "cudnn": Entry(
      run=functools.partial(_run_xla, implementation="cudnn"),
      default_on=("gpu",),
      default_if=_cudnn_is_default,
    ),
    "pallas_gpu": Entry(
      run=_pallas_gpu,
      default_on=("gpu",),
      unsupported_reason=lambda q, k, v, segment_ids: unsupported_reason("pallas_gpu", q, k, v),
      interpretable=True,
      forward_mode=False,
    ),
    "xla": Entry(
      run=functools.partial(_run_xla, implementation="xla"),
      default_on=PLATFORMS,
      default_if=lambda q, *_: portable_implementation(q) == "xla",
    ),
    "plain": Entry(run=functools.partial(_run_xla, implementation="plain"), default_on=PLATFORMS),
  },
)
