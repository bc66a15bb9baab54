"""Decayed linear attention for users: checks, dtypes and the choice of implementation."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.checks import (
  check_chunk,
  check_floating,
  check_implementation,
  check_inputs,
  check_shape,
)
from deltanet_jax.ops.documents import number_documents
from deltanet_jax.ops.dtypes import products_for, state_dtype
from deltanet_jax.ops.linear_attention import chunkwise, reference

Implementation = Literal["recurrent", "chunkwise"]


def linear_attention(
  q: Float[Array, "B L H dk"],
  k: Float[Array, "B L H dk"],
  v: Float[Array, "B L Hv dv"],
  *,
  g: Float[Array, "B L Hv"] | Float[Array, "B L Hv dk"] | None = None,
  h: Float[Array, "B L Hv dv"] | None = None,
  S0: Float[Array, "B Hv dk dv"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
  scale: float = 1.0,
  chunk: int = 64,
  implementation: Implementation | None = None,
) -> tuple[Float[Array, "B L Hv dv"], Float[Array, "B Hv dk dv"]]:
  """S_t = exp(g_t) S_{t-1} exp(h_t) + k_t (x) v_t; o_t = scale q_t S_t.

  Args:
    v: Hv is a multiple of H; value head j goes with key head j // (Hv / H).
    g: log decay (<= 0) per head, or per head and key channel.
    h: log decay (<= 0) per value channel.
    S0: state before the first token, zeros if None.
    segment_ids: documents packed into one row. The state starts from zero wherever the id
      changes; S0 belongs to the first document of a row, the returned S to the last.
    chunk: largest chunk of the chunkwise form, a power of two.
    implementation: "recurrent" is the definition, "chunkwise" the default.

  Returns:
    o in v's dtype, and the last state S, float32 (float64 for float64 inputs).
  """
  check_inputs(q, k, v, g=g, S0=S0, segment_ids=segment_ids)
  if h is not None:
    check_shape("h", h, v.shape, "v's [B, L, Hv, dv]")
    check_floating(h=h)
  check_chunk(chunk)
  implementation = implementation or "chunkwise"
  check_implementation(implementation, get_args(Implementation))
  B, _, H, dk = q.shape
  Hv, dv = v.shape[2:]
  dtype = state_dtype(q, k, v, g, h, S0)
  documents = None if segment_ids is None else number_documents(segment_ids)
  S0 = jnp.zeros((B, Hv, dk, dv), dtype) if S0 is None else S0.astype(dtype)
  q, k = (jnp.repeat(x.astype(dtype), Hv // H, axis=2) for x in (q * scale, k))
  v, g, h, given = *(None if x is None else x.astype(dtype) for x in (v, g, h)), v.dtype
  if implementation == "chunkwise":
    o, S = chunkwise.chunkwise(q, k, v, g, h, S0, documents, chunk=chunk, given=given)
  else:
    with products_for(given):
      o, S = reference.recurrent(q, k, v, g, h, S0, documents)
  return o.astype(given), S


def linear_attention_step(
  q_t: Float[Array, "B H dk"],
  k_t: Float[Array, "B H dk"],
  v_t: Float[Array, "B Hv dv"],
  S: Float[Array, "B Hv dk dv"],
  g_t: Float[Array, "B Hv"] | Float[Array, "B Hv dk"] | None = None,
  h_t: Float[Array, "B Hv dv"] | None = None,
  *,
  scale: float = 1.0,
) -> tuple[Float[Array, "B Hv dv"], Float[Array, "B Hv dk dv"]]:
  """One decoding token: `linear_attention` for L = 1 that continues from S."""
  q, k, v, g, h = (None if x is None else x[:, None] for x in (q_t, k_t, v_t, g_t, h_t))
  o, S = linear_attention(
    q,
    k,
    v,
    g=g,
    h=h,
    S0=S,
    scale=scale,
    implementation="recurrent",
  )
  return o[:, 0], S
