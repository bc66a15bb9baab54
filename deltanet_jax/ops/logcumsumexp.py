"""Cumulative log-sum-exp over time."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import check_floating, check_segment_ids, check_shape
from deltanet_jax.ops.dtypes import state_dtype
from deltanet_jax.ops.segments import segment_starts

# The logarithm of an empty sum; finite, so that the difference of two is not NaN.
EMPTY = -1e30


def logcumsumexp(
  x: Float[Array, "B L H M"],
  *,
  z0: Float[Array, "B H M"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
) -> Float[Array, "B L H M"]:
  """Compute z_t = log(e^{z_{t-1}} + e^{x_t}) with an associative scan over time.

  Args:
    x: Exponents.
    z0: Value before the first token, EMPTY if None; it belongs to the first segment.
    segment_ids: Segments of packed sequences; the sum restarts wherever the id changes.

  Returns:
    z in float32 (float64 for float64 inputs).
  """
  if x.ndim != 4 or 0 in x.shape:
    raise ValueError(f"x has shape {x.shape}, expected non-empty [B, L, H, M].")
  check_floating(x=x, z0=z0)
  check_segment_ids(segment_ids, x.shape[:2])
  dtype = state_dtype(x, z0)
  x = x.astype(dtype)
  if z0 is not None:
    check_shape("z0", z0, x[:, 0].shape, "[B, H, M]")
    x = x.at[:, 0].set(jnp.logaddexp(x[:, 0], z0.astype(dtype)))
  if segment_ids is None:
    return lax.associative_scan(jnp.logaddexp, x, axis=1)
  starts = segment_starts(segment_ids)[:, :, None, None]

  def combine(first, second):
    (z1, starts1), (z2, starts2) = first, second
    return jnp.where(starts2, z2, jnp.logaddexp(z1, z2)), starts1 | starts2

  return lax.associative_scan(combine, (x, starts), axis=1)[0]
