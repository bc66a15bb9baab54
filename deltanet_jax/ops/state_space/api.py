"""The diagonal state space for users: checks, dtypes and the choice of implementation."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Complex, Float, Int

from deltanet_jax.ops.checks import (
  check_floating,
  check_implementation,
  check_segment_ids,
  check_shape,
)
from deltanet_jax.ops.dtypes import state_dtype
from deltanet_jax.ops.state_space import convolution, reference

Implementation = Literal["recurrent", "convolution"]


def state_space(
  u: Float[Array, "B L d"],
  log_A: Complex[Array, "d N"],
  B: Complex[Array, "d N"],
  C: Complex[Array, "d N"],
  *,
  S0: Complex[Array, "B d N"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  implementation: Implementation | None = None,
) -> tuple[Float[Array, "B L d"], Complex[Array, "B d N"]]:
  """S_t = exp(log_A) S_{t-1} + B u_t per channel and state; y_t = 2 Re sum_n C_n S_t.

  Args:
    log_A: log of the transition, real part <= 0; one of each conjugate pair, hence the 2.
    S0: state before the first token, zeros if None.
    segment_ids: segments packed into one row. The state starts from zero wherever the id
      changes; S0 belongs to the first segment of a row, the returned S to the last.
    implementation: "recurrent" is the definition, "convolution" with the kernel C exp(log_A)^s B
      the default.

  Returns:
    y in u's dtype, and the last state S, complex64 (complex128 for float64 inputs).
  """
  if u.ndim != 3 or 0 in u.shape or log_A.ndim != 2:
    raise ValueError(f"u, log_A have shapes {u.shape}, {log_A.shape}, expected [B, L, d], [d, N].")
  batch, L, d = u.shape
  N = log_A.shape[1]
  for name, x in dict(log_A=log_A, B=B, C=C).items():
    check_shape(name, x, (d, N), "[d, N]")
  if S0 is not None:
    check_shape("S0", S0, (batch, d, N), "[B, d, N]")
  for name, x in dict(log_A=log_A, B=B, C=C, S0=S0).items():
    if x is not None and not jnp.issubdtype(x.dtype, jnp.complexfloating):
      raise ValueError(f"{name} has dtype {x.dtype}, expected a complex one such as complex64.")
  check_floating(u=u)
  check_segment_ids(segment_ids, (batch, L))
  implementation = implementation or "convolution"
  check_implementation(implementation, get_args(Implementation))
  real = state_dtype(u, log_A.real)
  dtype = jnp.complex128 if real == jnp.float64 else jnp.complex64
  S0 = None if S0 is None else S0.astype(dtype)
  run = convolution.convolve if implementation == "convolution" else reference.recurrent
  y, S = run(u.astype(real), *(x.astype(dtype) for x in (log_A, B, C)), S0, segment_ids)
  return y.astype(u.dtype), S
