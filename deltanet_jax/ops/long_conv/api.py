"""Public functions of long convolutions: argument checks, implementations and dispatch."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import check_floating, check_qk, check_segment_ids, check_shape
from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from deltanet_jax.ops.dtypes import state_dtype
from deltanet_jax.ops.long_conv import direct, fft
from deltanet_jax.ops.segments import number_segments

LONG_CONV = Operator(
  "long_conv",
  {
    "fft": Entry(run=fft.convolve, default_on=PLATFORMS),
    "direct": Entry(run=direct.convolve),
  },
)


def long_conv(
  u: Float[Array, "B L d"],
  h: Float[Array, "T H"],
  *,
  segment_ids: Int[Array, "B L"] | None = None,
  implementation: str | None = None,
) -> Float[Array, "B L d"]:
  """Convolve each channel of a sequence causally with a filter of up to its length.

  y_t = sum_{s < T} h_s u_{t-s} over the tokens of t's segment.

  Args:
    u: Inputs.
    h: Filters. d is a multiple of H; channel c uses filter c // (d / H).
    segment_ids: Segments of packed sequences; a segment does not see any other.
    implementation: "direct" (the definition) or "fft"; None selects "fft".

  Returns:
    y in u's dtype.
  """
  if u.ndim != 3 or h.ndim != 2 or 0 in (*u.shape, *h.shape) or u.shape[2] % h.shape[1]:
    raise ValueError(
      f"u, h have shapes {u.shape}, {h.shape}, expected non-empty [B, L, d] and [T, H] with d a"
      " multiple of H."
    )
  check_floating(u=u, h=h)
  check_segment_ids(segment_ids, u.shape[:2])
  entry = LONG_CONV.resolve(implementation)
  dtype = state_dtype(u, h)
  B, L, d = u.shape
  T, H = h.shape
  # Tokens last, the axis of the FFTs; the channels of a head share its filter.
  x = jnp.moveaxis(u.astype(dtype).reshape(B, L, H, d // H), 1, 3)
  taps = jnp.pad(h[:L].astype(dtype), ((0, max(L - T, 0)), (0, 0))).T
  y = entry.run(x, taps, number_segments(segment_ids))
  return jnp.moveaxis(y, 3, 1).reshape(B, L, d).astype(u.dtype)


def long_conv_attention(
  q: Float[Array, "B L H N"],
  k: Float[Array, "B L H N"],
  v: Float[Array, "B L H N"],
  h: Float[Array, "T H"],
  *,
  segment_ids: Int[Array, "B L"] | None = None,
  implementation: str | None = None,
) -> Float[Array, "B L H N"]:
  """Read a long convolution of outer products k (x) v with queries (multi-head Hyena).

  o_t = q_t Z_t, Z_t = sum_{s < T} h_s k_{t-s} (x) v_{t-s} over the tokens of t's segment.

  Runs one long convolution of N channels per head for every key channel, sequentially: Z
  `[B L H N N]` is never materialized, not in the backward pass either.

  Args:
    q: Queries.
    k: Keys.
    v: Values.
    h: Filters, one per head.
    segment_ids: Segments of packed sequences; a segment does not see any other.
    implementation: As in `long_conv`.
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
