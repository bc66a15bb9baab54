"""Public function of the diagonal state space: argument checks, implementations, dispatch."""

import jax.numpy as jnp
from jaxtyping import Array, Complex, Float, Int

from deltanet_jax.ops.checks import check_floating, check_segment_ids, check_shape
from deltanet_jax.ops.dispatch import PLATFORMS, Entry, Operator
from deltanet_jax.ops.dtypes import state_dtype
from deltanet_jax.ops.state_space import convolution, reference


def state_space(
  u: Float[Array, "B L d"],
  log_A: Complex[Array, "d N"],
  B: Complex[Array, "d N"],
  C: Complex[Array, "d N"],
  *,
  S0: Complex[Array, "B d N"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  implementation: str | None = None,
) -> tuple[Float[Array, "B L d"], Complex[Array, "B d N"]]:
  """Apply a diagonal, time-invariant state space model (S4D) to a sequence.

  S_t = exp(log_A) S_{t-1} + B u_t per channel and state; y_t = 2 Re sum_n C_n S_t.

  Args:
    u: Inputs.
    log_A: Log of the transition, real part <= 0; one of each conjugate pair, hence the 2.
    B: Input projection.
    C: Output projection.
    S0: State before the first token, zeros if None.
    segment_ids: Segments of packed sequences. The state is reset to zero wherever the id changes;
      S0 belongs to the first segment of a sequence, the returned S to the last.
    implementation: "recurrent" (the definition) or "convolution" (with the impulse response
      C exp(log_A)^s B); None selects "convolution".

  Returns:
    y in u's dtype, and the last state S in complex64 (complex128 for float64 inputs).
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
      raise ValueError(f"{name} has dtype {x.dtype}, expected a complex dtype such as complex64.")
  check_floating(u=u)
  check_segment_ids(segment_ids, (batch, L))
  entry = STATE_SPACE.resolve(implementation)
  real = state_dtype(u, log_A.real)
  dtype = jnp.complex128 if real == jnp.float64 else jnp.complex64
  S0 = None if S0 is None else S0.astype(dtype)
  y, S = entry.run(u.astype(real), *(x.astype(dtype) for x in (log_A, B, C)), S0, segment_ids)
  return y.astype(u.dtype), S


STATE_SPACE = Operator(
  "state_space",
  {
    "convolution": Entry(run=convolution.convolve, default_on=PLATFORMS),
    "recurrent": Entry(run=reference.recurrent),
  },
)
