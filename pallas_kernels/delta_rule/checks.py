"""What no kernel of the delta rule and of linear attention takes, without importing Pallas."""

import jax.numpy as jnp

# What forward mode meets, in kernels and in all forms whose backward is written by hand.
NO_FORWARD_MODE = (
  'forward mode (jax.jvp, jax.hessian, jax.linearize) is for implementation="recurrent",'
  " in a model a setting of its mixer: the faster forms have a backward by hand instead."
)
# Log decays below it are taken as it: e^-128 is 0 in float32, and the sums of a chunk stay exact.
FAR_BELOW = -128.0
MAX_KEY_SIZE, MAX_VALUE_SIZE = 256, 512  # channels of a head; sums over keys are exact up to 256


def unsupported_reason(q, k, v, beta, g, S0, channels: bool = False) -> str | None:
  """Why no kernel takes these inputs, in one sentence; None if the kernels take them.

  Args:
    q, k, v: [B L H d] of a sequence, or [B H d] of one token; beta, g likewise.
    beta: None for linear attention.
    S0: the state before, or anything with its dtype; None for zeros.
    channels: whether the kernel has gates per key channel.
  """
  plain = "chunkwise" if v.ndim == 4 else "recurrent"
  dk, dv = k.shape[-1], v.shape[-1]
  if dk > MAX_KEY_SIZE or dv > MAX_VALUE_SIZE:
    return (
      f"a kernel takes keys of up to {MAX_KEY_SIZE} and values of up to {MAX_VALUE_SIZE} channels,"
      f" got {dk} and {dv}; use implementation={plain!r}"
    )
  if not q.dtype == k.dtype == v.dtype or v.dtype not in (jnp.bfloat16, jnp.float32):
    return (
      "a kernel takes q, k, v of one dtype, bfloat16 or float32, got"
      f" {q.dtype}, {k.dtype}, {v.dtype}; use implementation={plain!r}"
    )
  for name, x in dict(beta=beta, g=g, S0=S0).items():
    if x is not None and x.dtype == jnp.float64:
      return f"a kernel's state is float32, got a float64 {name}; use implementation={plain!r}"
  if g is not None and g.ndim != v.ndim - 1 and not channels:
    return (
      f"a kernel takes one gate per value head, g of shape {v.shape[:-1]}, got {g.shape}; for"
      f" gates per key channel use implementation={plain!r}"
    )
  return None


def check_inputs(q, k, v, beta, g, S0, channels: bool = False):
  """Raises what `unsupported_reason` says of these inputs."""
  H, Hv = k.shape[-2], v.shape[-2]
  if Hv % H:
    raise ValueError(f"value heads {Hv} are not a multiple of key heads {H}")
  if reason := unsupported_reason(q, k, v, beta, g, S0, channels):
    raise ValueError(reason)
