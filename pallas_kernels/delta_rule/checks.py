"""Limits of the delta rule and linear attention kernels; does not import Pallas."""

import jax.numpy as jnp

# Log decays are clamped to this: e^-128 is 0 in float32, and the sums over a chunk stay exact.
FAR_BELOW = -128.0
MAX_KEY_SIZE, MAX_VALUE_SIZE = 256, 512  # channels of a head; sums over keys are exact up to 256


def unsupported_reason(q, k, v, beta, g, S0, channels: bool = False) -> str | None:
  """Return why no kernel supports these inputs, or None if the kernels do.

  Args:
    q, k, v: [B L H d] of a sequence, or [B H d] of one token; beta, g likewise.
    beta: None for linear attention.
    S0: The initial state, or anything with its dtype; None for zeros.
    channels: Whether the kernel supports per-channel (vector) gates.
  """
  dk, dv = k.shape[-1], v.shape[-1]
  if dk > MAX_KEY_SIZE or dv > MAX_VALUE_SIZE:
    return (
      f"a kernel takes keys of up to {MAX_KEY_SIZE} and values of up to {MAX_VALUE_SIZE} channels,"
      f" got {dk} and {dv}"
    )
  if not q.dtype == k.dtype == v.dtype or v.dtype not in (jnp.bfloat16, jnp.float32):
    return (
      "a kernel takes q, k, v of one dtype, bfloat16 or float32, got"
      f" {q.dtype}, {k.dtype}, {v.dtype}"
    )
  for name, x in dict(beta=beta, g=g, S0=S0).items():
    if x is not None and x.dtype == jnp.float64:
      return f"a kernel's state is float32, got a float64 {name}"
  if g is not None and g.ndim != v.ndim - 1 and not channels:
    return f"a kernel takes one gate per value head, g of shape {v.shape[:-1]}, got {g.shape}"
  return None


def check_inputs(q, k, v, beta, g, S0, channels: bool = False):
  """Raise ValueError if the kernels do not support these inputs."""
  H, Hv = k.shape[-2], v.shape[-2]
  if Hv % H:
    raise ValueError(f"v has {Hv} heads, expected a multiple of the {H} key heads.")
  if reason := unsupported_reason(q, k, v, beta, g, S0, channels):
    raise ValueError(reason)
