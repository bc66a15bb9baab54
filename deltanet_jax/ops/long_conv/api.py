"""Long convolutions for users: checks, dtypes and the choice of implementation."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_floating,
  check_implementation,
  check_qk,
  check_segment_ids,
  check_shape,
)
from deltanet_jax.ops.dtypes import state_dtype
from deltanet_jax.ops.long_conv import direct, halves
from deltanet_jax.ops.segments import number_segments

Implementation = Literal["direct", "fft"]
_FORMS = {"direct": direct.convolve, "fft": halves.convolve}


def long_conv(
  u: Float[Array, "B L d"],
  h: Float[Array, "T H"],
  *,
  segment_ids: Int[Array, "B L"] | None = None,
  implementation: Implementation | None = None,
) -> Float[Array, "B L d"]:
  """y_t = sum_{s < T} h_s u_{t-s}, channel by channel, over the tokens of t's segment.

  Args:
    h: filters; d is a multiple of H, and channel c goes with filter c // (d / H).
    segment_ids: segments packed into one row; nothing passes from one to another.
    implementation: "direct" is the definition, "fft" the default.
  """
  if u.ndim != 3 or h.ndim != 2 or 0 in (*u.shape, *h.shape) or u.shape[2] % h.shape[1]:
    raise ValueError(
      f"u, h have shapes {u.shape}, {h.shape}, expected non-empty [B, L, d] and [T, H] with d a"
      " multiple of H."
    )
  check_floating(u=u, h=h)
  check_segment_ids(segment_ids, u.shape[:2])
  implementation = implementation or "fft"
  check_implementation(implementation, get_args(Implementation))
  dtype = state_dtype(u, h)
  B, L, d = u.shape
  T, H = h.shape
  segments = None if segment_ids is None else number_segments(segment_ids)
  # Tokens last, the axis of the transforms; a channel's filter is found by its head.
  x = jnp.moveaxis(u.astype(dtype).reshape(B, L, H, d // H), 1, 3)
  taps = jnp.pad(h[:L].astype(dtype), ((0, max(L - T, 0)), (0, 0))).T
  y = _FORMS[implementation](x, taps, segments)
  return jnp.moveaxis(y, 3, 1).reshape(B, L, d).astype(u.dtype)


def long_conv_attention(
  q: Float[Array, "B L H N"],
  k: Float[Array, "B L H N"],
  v: Float[Array, "B L H N"],
  h: Float[Array, "T H"],
  *,
  segment_ids: Int[Array, "B L"] | None = None,
  implementation: Implementation | None = None,
) -> Float[Array, "B L H N"]:
  """o_t = q_t Z_t, Z_t = sum_{s < T} h_s k_{t-s} (x) v_{t-s} over the tokens of t's segment.

  One long convolution of N channels per head for every channel of the keys, one after the other:
  Z `[B L H N N]` never exists, in the backward neither.
  """
  check_qk(q, k)
  check_shape("v", v, q.shape, "q's [B, L, H, N]")
  B, L, H, N = q.shape

  @jax.checkpoint
  def one_channel(q_i, k_i, v, h):
    u = (k_i[..., None] * v).reshape(B, L, H * N)
    z = long_conv(u, h, segment_ids=segment_ids, implementation=implementation)
    return q_i[..., None] * z.reshape(v.shape)

  add = lambda o, qk: (o + one_channel(*qk, v, h), None)
  return lax.scan(add, jnp.zeros_like(v), (jnp.moveaxis(q, 3, 0), jnp.moveaxis(k, 3, 0)))[0]
