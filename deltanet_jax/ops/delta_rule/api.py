"""The delta rule for users: checks, dtypes and the choice of implementation."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.delta_rule import chunkwise, parallel, reference

Implementation = Literal["recurrent", "chunkwise", "parallel"]


def delta_rule(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  v: Float[Array, "B L Hv dv"],
  beta: Float[Array, "B L Hv"],
  *,
  g: Float[Array, "B L Hv"] | Float[Array, "B L Hv dk"] | None = None,
  S0: Float[Array, "B Hv dk dv"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
  chunk: int = 64,
  implementation: Implementation | None = None,
  interpret: bool = False,
) -> tuple[Float[Array, "B L Hv dv"], Float[Array, "B Hv dk dv"]]:
  """S_t = S' + k_t (x) beta_t (v_t - k_t S'), S' = exp(g_t) S_{t-1}; o_t = scale q_t S_t.

  Keys should have norm 1 and beta lie in (0, 1), or (0, 2) for negative eigenvalues; nothing is
  normalised here. Gradients flow to q, k, v, beta, g and S0, by reverse mode to any order.

  Args:
    v: Hv is a multiple of H; value head j goes with key head j // (Hv / H).
    g: log decay (<= 0) per head, or per head and key channel.
    S0: state before the first token, zeros if None.
    segment_ids: documents packed into one row. The state starts from zero wherever the id
      changes; S0 belongs to the first document of a row, the returned S to the last.
    chunk: largest chunk of the chunkwise form, a power of two.
    implementation: "recurrent" (the definition, a scan over tokens), "chunkwise" (a scan over
      chunks, products inside) or "parallel" (L x L matrices). None takes the fastest of the
      platform. A named one runs or raises.
    interpret: runs a Pallas kernel on the CPU; refused by implementations without one.

  Returns:
    o in v's dtype, and the last state S, float32 (float64 for float64 inputs).
  """
  _check_qk(q, k)
  B, L, H, dk = q.shape
  if v.ndim != 4 or v.shape[:2] != (B, L) or v.shape[2] % H or v.shape[2] == 0:
    raise ValueError(
      f"v has shape {v.shape}, expected [B, L, Hv, dv] = [{B}, {L}, a multiple of {H}, dv]."
    )
  Hv, dv = v.shape[2:]
  _check_shape("beta", beta, (B, L, Hv), "[B, L, Hv]")
  _check_gate(g, (B, L, Hv, dk))
  if S0 is not None:
    _check_shape("S0", S0, (B, Hv, dk, dv), "[B, Hv, dk, dv]")
  _check_floating(q=q, k=k, v=v, beta=beta, g=g, S0=S0)
  _check_segment_ids(segment_ids, (B, L))
  if not isinstance(chunk, int) or chunk < 1 or chunk & (chunk - 1):
    raise ValueError(f"chunk is {chunk!r}, expected a power of two, for instance 64.")
  implementation = implementation or "chunkwise"
  if implementation not in get_args(Implementation):
    raise ValueError(
      f"implementation is {implementation!r}, expected one of {list(get_args(Implementation))}."
    )
  if interpret:
    raise ValueError(
      f"interpret=True is for Pallas kernels, and implementation {implementation!r} has none."
    )

  dtype = _state_dtype(q, k, v, beta, g, S0)
  run = None if segment_ids is None else _runs(segment_ids)
  S0 = jnp.zeros((B, Hv, dk, dv), dtype) if S0 is None else S0.astype(dtype)
  if implementation == "chunkwise":
    return chunkwise.chunkwise(q, k, v, beta, g, S0, run, scale=float(scale), chunk=chunk)
  form = reference.recurrent if implementation == "recurrent" else parallel.parallel
  q, k = (jnp.repeat(x.astype(dtype), Hv // H, axis=2) for x in (q * scale, k))
  g = None if g is None else g.astype(dtype)
  o, S = form(q, k, v.astype(dtype), beta.astype(dtype), g, S0, run)
  return o.astype(v.dtype), S


def delta_rule_step(
  q_t: Float[Array, "B H dk"],
  k_t: Float[Array, "B H dk"],
  v_t: Float[Array, "B Hv dv"],
  beta_t: Float[Array, "B Hv"],
  S: Float[Array, "B Hv dk dv"],
  g_t: Float[Array, "B Hv"] | Float[Array, "B Hv dk"] | None = None,
  *,
  scale: float = 1.0,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"]]:
  """One decoding token: `delta_rule` for L = 1 that continues from S."""
  o, S = delta_rule(
    *(x[:, None] for x in (q_t, k_t, v_t, beta_t)),
    g=None if g_t is None else g_t[:, None],
    S0=S,
    scale=scale,
    implementation="recurrent",
  )
  return o[:, 0], S


def delta_rule_attention(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  beta: Float[Array, "B L Hv"],
  *,
  g: Float[Array, "B L Hv"] | Float[Array, "B L Hv dk"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
) -> Float[Array, "B Hv L L"]:
  """The L x L matrix A of the fully parallel form: o = A v where the state starts from zero."""
  _check_qk(q, k)
  B, L, H, dk = q.shape
  if beta.ndim != 3 or beta.shape[:2] != (B, L) or beta.shape[2] % H or beta.shape[2] == 0:
    raise ValueError(
      f"beta has shape {beta.shape}, expected [B, L, Hv] = [{B}, {L}, a multiple of {H}]."
    )
  Hv = beta.shape[2]
  _check_gate(g, (B, L, Hv, dk))
  _check_floating(q=q, k=k, beta=beta, g=g)
  _check_segment_ids(segment_ids, (B, L))
  dtype = _state_dtype(q, k, beta, g)
  run = None if segment_ids is None else _runs(segment_ids)
  q, k = (jnp.repeat(x.astype(dtype), Hv // H, axis=2) for x in (q * scale, k))
  g = None if g is None else g.astype(dtype)
  return parallel.attention(q, k, beta.astype(dtype), g, run)


def _state_dtype(*arrays):
  wide = any(x is not None and x.dtype == jnp.float64 for x in arrays)
  return jnp.float64 if wide else jnp.float32


def _runs(segment_ids):
  """Numbers the documents of each row 0, 1, ..: an id that comes back later is a new document."""
  changed = segment_ids[:, 1:] != segment_ids[:, :-1]
  return jnp.pad(jnp.cumsum(changed, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def _check_qk(q, k):
  if q.ndim != 4 or 0 in q.shape:
    raise ValueError(f"q has shape {q.shape}, expected non-empty [B, L, H, dk].")
  _check_shape("k", k, q.shape, "q's [B, L, H, dk]")


def _check_shape(name, x, shape, meaning):
  if x.shape != shape:
    raise ValueError(f"{name} has shape {x.shape}, expected {meaning} = {list(shape)}.")


def _check_gate(g, shape):
  if g is not None and g.shape not in (shape, shape[:3]):
    raise ValueError(
      f"g has shape {g.shape}, expected [B, L, Hv] = {list(shape[:3])} or"
      f" [B, L, Hv, dk] = {list(shape)}."
    )


def _check_floating(**arrays):
  for name, x in arrays.items():
    if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"{name} has dtype {x.dtype}, expected a floating dtype such as float32.")


def _check_segment_ids(segment_ids, shape):
  if segment_ids is None:
    return
  if segment_ids.shape != shape or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
    raise ValueError(
      f"segment_ids has shape {segment_ids.shape} and dtype {segment_ids.dtype},"
      f" expected integers of shape [B, L] = {list(shape)}."
    )
