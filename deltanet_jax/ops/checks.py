"""Checks of arguments that recurrent operators share."""

import jax.numpy as jnp


def check_inputs(q, k, v, *, beta=None, g=None, S0=None, segment_ids=None):
  """Check shapes and dtypes of a recurrence over q, k `[B L H dk]` and v `[B L Hv dv]`."""
  check_qk(q, k)
  B, L, H, dk = q.shape
  if v.ndim != 4 or v.shape[:2] != (B, L) or v.shape[2] % H or 0 in v.shape:
    raise ValueError(
      f"v has shape {v.shape}, expected [B, L, Hv, dv] = [{B}, {L}, a multiple of {H}, dv of at"
      " least 1]."
    )
  Hv, dv = v.shape[2:]
  if beta is not None:
    check_shape("beta", beta, (B, L, Hv), "[B, L, Hv]")
  check_gate(g, (B, L, Hv, dk))
  if S0 is not None:
    check_shape("S0", S0, (B, Hv, dk, dv), "[B, Hv, dk, dv]")
  check_floating(q=q, k=k, v=v, beta=beta, g=g, S0=S0)
  check_segment_ids(segment_ids, (B, L))


def check_token(q_t, k_t, v_t):
  """Check the shapes of one decoding token: q_t, k_t `[B H dk]`, v_t `[B Hv dv]`."""
  if q_t.ndim != 3 or 0 in q_t.shape:
    raise ValueError(f"q_t has shape {q_t.shape}, expected non-empty [B, H, dk].")
  check_shape("k_t", k_t, q_t.shape, "q_t's [B, H, dk]")
  B, H, _ = q_t.shape
  if v_t.ndim != 3 or v_t.shape[0] != B or v_t.shape[1] % H or 0 in v_t.shape:
    raise ValueError(
      f"v_t has shape {v_t.shape}, expected [B, Hv, dv] = [{B}, a multiple of {H}, dv of at least"
      " 1]."
    )


def check_qk(q, k):
  """Check the shapes of q and k `[B L H dk]`."""
  if q.ndim != 4 or 0 in q.shape:
    raise ValueError(f"q has shape {q.shape}, expected non-empty [B, L, H, dk].")
  check_shape("k", k, q.shape, "q's [B, L, H, dk]")


def check_shape(name, x, shape, meaning):
  """Raise ValueError unless x has this shape; `meaning` names its axes."""
  if x.shape != shape:
    raise ValueError(f"{name} has shape {x.shape}, expected {meaning} = {list(shape)}.")


def check_gate(g, shape):
  """Check a per-head or per-channel gate; `shape` is [B, L, Hv, dk]."""
  if g is not None and g.shape not in (shape, shape[:3]):
    raise ValueError(
      f"g has shape {g.shape}, expected [B, L, Hv] = {list(shape[:3])} or"
      f" [B, L, Hv, dk] = {list(shape)}."
    )


def check_floating(**arrays):
  """Raise ValueError unless all arrays that are not None are floating point."""
  for name, x in arrays.items():
    if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"{name} has dtype {x.dtype}, expected a floating dtype such as float32.")


def check_segment_ids(segment_ids, shape):
  """Check that segment_ids, if given, are integers of shape [B, L]."""
  if segment_ids is None:
    return
  if segment_ids.shape != shape or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
    raise ValueError(
      f"segment_ids has shape {segment_ids.shape} and dtype {segment_ids.dtype},"
      f" expected integers of shape [B, L] = {list(shape)}."
    )


def check_chunk(chunk: int | None):
  """Raise ValueError unless a chunk size is a power of two or None."""
  if chunk is not None and (not isinstance(chunk, int) or chunk < 1 or chunk & (chunk - 1)):
    raise ValueError(f"chunk is {chunk!r}, expected a power of two, for instance 64.")
