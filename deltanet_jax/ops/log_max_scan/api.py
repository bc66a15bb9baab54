"""Public functions of the log-max scan: argument checks, implementations and dispatch."""

from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_segment_ids,
  check_shape,
)
from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from deltanet_jax.ops.dtypes import state_dtype
from deltanet_jax.ops.log_max_scan import chunkwise, reference


def log_max_scan(
  k: Float[Array, "B L D"],
  v: Float[Array, "B L D"],
  w: Float[Array, " D"],
  u: Float[Array, " D"],
  *,
  S0: Float[Array, "B 3 D"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  chunk: int = 64,
  implementation: str | None = None,
) -> tuple[Float[Array, "B L D"], Float[Array, "B 3 D"]]:
  """Average values with exponential weights and a decay, as RWKV-4 does (its WKV operator).

  y_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same sum with 1 for v).

  Args:
    k: Exponents of the weights.
    v: Values.
    w: Log decay per channel, <= 0.
    u: Bonus: added to the exponent of the current token.
    S0: State before the first token, `empty_log_max_state` if None: numerator and denominator in
      units of e^p, and p, the largest exponent in them. p is a constant for gradients.
    segment_ids: Segments of packed sequences. The state is reset wherever the id changes; S0
      belongs to the first segment of a sequence, the returned S to the last.
    chunk: Tokens of one associative scan, a power of two.
    implementation: "recurrent" (the definition) or "chunkwise"; None selects "chunkwise".

  Returns:
    y in v's dtype, and the last state S in float32 (float64 for float64 inputs).
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
  entry = LOG_MAX_SCAN.resolve(implementation)
  dtype = state_dtype(k, v, w, u, S0)
  S0 = empty_log_max_state(B, D, dtype) if S0 is None else S0.astype(dtype)
  y, S = entry.run(k, v, w.astype(dtype), u.astype(dtype), S0, segment_ids, chunk)
  return y.astype(v.dtype), S


def empty_log_max_state(batch: int, channels: int, dtype) -> Float[Array, "B 3 D"]:
  """Return the state before any token: both sums are 0."""
  return reference.empty((batch, channels), dtype)


def _recurrent(k, v, w, u, S0, segment_ids, chunk):
  del chunk
  return reference.recurrent(k, v, w, u, S0, segment_ids)


def _chunkwise(k, v, w, u, S0, segment_ids, chunk):
  return chunkwise.chunkwise(k, v, w, u, S0, segment_ids, chunk=chunk)


LOG_MAX_SCAN = Operator(
  "log_max_scan",
  {
    "chunkwise": Entry(run=_chunkwise, default_on=PLATFORMS),
    "recurrent": Entry(run=_recurrent),
  },
)
