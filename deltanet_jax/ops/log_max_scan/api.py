"""The log-max scan for users: checks, dtypes and the choice of implementation."""

from typing import Literal, get_args

from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_implementation,
  check_segment_ids,
  check_shape,
)
from deltanet_jax.ops.dtypes import state_dtype
from deltanet_jax.ops.log_max_scan import chunkwise, reference

Implementation = Literal["recurrent", "chunkwise"]


def log_max_scan(
  k: Float[Array, "B L D"],
  v: Float[Array, "B L D"],
  w: Float[Array, " D"],
  u: Float[Array, " D"],
  *,
  S0: Float[Array, "B 3 D"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  chunk: int = 64,
  implementation: Implementation | None = None,
) -> tuple[Float[Array, "B L D"], Float[Array, "B 3 D"]]:
  """y_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same with 1 for v).

  Args:
    w: log decay per channel, <= 0.
    u: what the exponent of the current token has more.
    S0: state before the first token, `empty_log_max_state` if None: both sums in units of e^p,
      and p, the largest exponent in them. Gradients hold p fixed.
    segment_ids: segments packed into one row. The state starts empty wherever the id changes; S0
      belongs to the first segment of a row, the returned S to the last.
    chunk: tokens of one associative scan, a power of two.
    implementation: "recurrent" is the definition, "chunkwise" the default.

  Returns:
    y in v's dtype, and the last state S, float32 (float64 for float64 inputs).
  """
  if k.ndim != 3 or 0 in k.shape:
    raise ValueError(f"k has shape {k.shape}, expected non-empty [B, L, D].")
  B, L, D = k.shape
  check_shape("v", v, k.shape, "k's [B, L, D]")
  check_shape("w", w, (D,), "[D]")
  check_shape("u", u, (D,), "[D]")
  if S0 is not None:
    check_shape("S0", S0, (B, 3, D), "[B, 3, D]")
  check_floating(k=k, v=v, w=w, u=u, S0=S0)
  check_segment_ids(segment_ids, (B, L))
  check_chunk(chunk)
  implementation = implementation or "chunkwise"
  check_implementation(implementation, get_args(Implementation))
  dtype = state_dtype(k, v, w, u, S0)
  S0 = empty_log_max_state(B, D, dtype) if S0 is None else S0.astype(dtype)
  inputs = (k, v, w.astype(dtype), u.astype(dtype), S0, segment_ids)
  if implementation == "chunkwise":
    y, S = chunkwise.chunkwise(*inputs, chunk=chunk)
  else:
    y, S = reference.recurrent(*inputs)
  return y.astype(v.dtype), S


def empty_log_max_state(batch: int, channels: int, dtype) -> Float[Array, "B 3 D"]:
  """The state before any token: both sums are 0."""
  return reference.empty((batch, channels), dtype)
