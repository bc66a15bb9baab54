"""Causal softmax attention over whole sequences, all earlier tokens or a sliding window."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.attention.forms import portable
from deltanet_jax.ops.attention.masked import masked_attention
from deltanet_jax.ops.dispatch import target_platform
from deltanet_jax.ops.segments import number_segments
from pallas_kernels.attention.checks import unsupported_reason

_KERNELS = {"pallas_tpu": "attention_tpu", "pallas_gpu": "attention_gpu"}
Implementation = Literal["plain", "xla", "cudnn", "pallas_tpu", "pallas_gpu"]


def causal_attention(
  q: Float[Array, "B L H d"],
  k: Float[Array, "B L Hk d"],
  v: Float[Array, "B L Hk d"],
  *,
  window: int | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  implementation: Implementation | None = None,
  interpret: bool = False,
) -> Float[Array, "B L H d"]:
  """softmax(q k^T / sqrt(d)) v over the tokens of the same segment up to the current one.

  Args:
    window: how many keys a token sees, its own included; None is all.
    implementation: "plain" products and softmax in the inputs' dtype (float32 at least), "xla" or
      "cudnn" of `jax.nn.dot_product_attention`, "pallas_tpu" or "pallas_gpu", our own kernels. A
      named one runs or raises. None takes, for half precision, pallas_tpu on a TPU, and on a GPU
      cudnn, or pallas_gpu where rows hold segments or there is no GPU to ask for its cuDNN, with a
      window or without; and where these do not serve xla for float32 and plain else: xla rounds
      float64 to float32, and its gradient for bfloat16 mixes dtypes, which strict promotion
      forbids.
    interpret: runs a Pallas kernel on the CPU; refused by implementations without one.
  """
  if q.ndim != 4 or 0 in q.shape:
    raise ValueError(f"q has shape {q.shape}, expected non-empty [B, L, H, d].")
  if window is not None and window < 1:
    raise ValueError(f"window is {window}, expected at least 1 key, the token's own.")
  if interpret and implementation not in _KERNELS:
    raise ValueError(
      f"interpret=True is for Pallas kernels, and implementation {implementation!r} is none."
    )
  implementation = implementation or _fastest(q, k, v, segment_ids)
  segments = None if segment_ids is None else number_segments(segment_ids)
  if implementation not in _KERNELS:
    return masked_attention(q, k, v, segments, window, implementation)
  from pallas_kernels import attention as kernels  # when it is called: it is heavy

  kernel = getattr(kernels, _KERNELS[implementation])
  return kernel(q, k, v, segments, window=window, interpret=interpret)


def _fastest(q, k, v, segment_ids):
  """The platform's fastest implementation for these inputs."""
  platform = target_platform()
  if platform == "tpu" and not unsupported_reason("pallas_tpu", q, k, v):
    return "pallas_tpu"
  # Not only `target_platform`: JAX asks the installed cuDNN for its version while tracing.
  has_cudnn = platform == "gpu" and jax.default_backend() == "gpu" and _cudnn_serves(q)
  if has_cudnn and segment_ids is None:
    return "cudnn"
  if platform == "gpu" and not unsupported_reason("pallas_gpu", q, k, v):
    return "pallas_gpu"
  return portable(q)


def _cudnn_serves(q):
  """Whether cuDNN takes these inputs, forward and backward: JAX refuses odd lengths."""
  half = q.dtype in (jnp.bfloat16, jnp.float16)
  return half and q.shape[1] % 2 == 0 and q.shape[3] % 8 == 0 and q.shape[3] <= 128
