"""Decayed linear attention for users: checks, dtypes and the choice of implementation."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.linear_attention import chunkwise, reference
from deltanet_jax.ops.segments import runs

Implementation = Literal["recurrent", "chunkwise"]


def linear_attention(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  v: Float[Array, "B L Hv dv"],
  *,
  g: Float[Array, "B L Hv"] | Float[Array, "B L Hv dk"] | None = None,
  S0: Float[Array, "B Hv dk dv"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
  chunk: int = 64,
  implementation: Implementation | None = None,
) -> tuple[Float[Array, "B L Hv dv"], Float[Array, "B Hv dk dv"]]:
  """S_t = exp(g_t) S_{t-1} + k_t (x) v_t; o_t = scale q_t S_t.

  Args:
    v: Hv is a multiple of H; value head j goes with key head j // (Hv / H).
    g: log decay (<= 0) per head, or per head and key channel.
    S0: state before the first token, zeros if None.
    segment_ids: documents packed into one row. The state starts from zero wherever the id
      changes; S0 belongs to the first document of a row, the returned S to the last.
    chunk: largest chunk of the chunkwise form, a power of two.
    implementation: "recurrent" is the definition, "chunkwise" the default.

  Returns:
    o in v's dtype, and the last state S, float32 (float64 for float64 inputs).
  """
  B, L, H, dk = q.shape
  if k.shape != q.shape:
    raise ValueError(f"k has shape {k.shape}, expected q's {list(q.shape)}.")
  if v.ndim != 4 or v.shape[:2] != (B, L) or v.shape[2] % H or v.shape[2] == 0:
    raise ValueError(
      f"v has shape {v.shape}, expected [B, L, Hv, dv] = [{B}, {L}, a multiple of {H}, dv]."
    )
  Hv, dv = v.shape[2:]
  if g is not None and g.shape not in ((B, L, Hv), (B, L, Hv, dk)):
    raise ValueError(
      f"g has shape {g.shape}, expected [B, L, Hv] = {[B, L, Hv]} or"
      f" [B, L, Hv, dk] = {[B, L, Hv, dk]}."
    )
  if not isinstance(chunk, int) or chunk < 1 or chunk & (chunk - 1):
    raise ValueError(f"chunk is {chunk!r}, expected a power of two, for instance 64.")
  implementation = implementation or "chunkwise"
  if implementation not in get_args(Implementation):
    raise ValueError(
      f"implementation is {implementation!r}, expected one of {list(get_args(Implementation))}."
    )
  wide = any(x is not None and x.dtype == jnp.float64 for x in (q, k, v, g, S0))
  dtype = jnp.float64 if wide else jnp.float32
  run = None if segment_ids is None else runs(segment_ids)
  S0 = jnp.zeros((B, Hv, dk, dv), dtype) if S0 is None else S0.astype(dtype)
  q, k = (jnp.repeat(x.astype(dtype), Hv // H, axis=2) for x in (q * scale, k))
  g = None if g is None else g.astype(dtype)
  if implementation == "chunkwise":
    exact = jnp.finfo(v.dtype).bits >= 32
    o, S = chunkwise.chunkwise(q, k, v.astype(dtype), g, S0, run, chunk=chunk, exact=exact)
  else:
    o, S = reference.recurrent(q, k, v.astype(dtype), g, S0, run)
  return o.astype(v.dtype), S


def linear_attention_step(
  q_t: Float[Array, "B H dk"],
  k_t: Float[Array, "B H dk"],
  v_t: Float[Array, "B Hv dv"],
  S: Float[Array, "B Hv dk dv"],
  g_t: Float[Array, "B Hv"] | Float[Array, "B Hv dk"] | None = None,
  *,
  scale: float = 1.0,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"]]:
  """One decoding token: `linear_attention` for L = 1 that continues from S."""
  o, S = linear_attention(
    *(x[:, None] for x in (q_t, k_t, v_t)),
    g=None if g_t is None else g_t[:, None],
    S0=S,
    scale=scale,
    implementation="recurrent",
  )
  return o[:, 0], S
