"""Elementwise linear recurrence h_t = a_t h_{t-1} + x_t, in chunks with recomputation."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from deltanet_jax.ops.documents import changes


def elementwise_scan(
  elements: Callable,
  readout: Callable,
  inputs,
  h0: Array,
  *,
  segment_ids: Int[Array, "B L"] | None = None,
  chunk: int = 64,
  implementation: Literal["chunked", "recurrent"] = "chunked",
):
  """(y, h) of h_t = a_t h_{t-1} + x_t, where a_t, x_t come from the inputs and y_t from h_t.

  The states `[B L *d]` are many times larger than inputs and outputs. They exist for one chunk at
  a time, in the backward too.

  Args:
    elements: inputs of some tokens `[B T ..]` -> (a, x), each `[B T *d]`; a in [0, 1] in modulus.
    readout: (h `[B T *d]`, inputs of these tokens) -> y `[B T ..]`.
    inputs: pytree of `[B L ..]` arrays.
    segment_ids: h starts from zero wherever the id changes; h0 belongs to the first document.
    implementation: "chunked" is an associative scan inside chunks, "recurrent" the definition.

  Returns:
    y for all tokens, and h after the last.
  """
  B, L = jax.tree.leaves(inputs)[0].shape[:2]
  if implementation not in ("chunked", "recurrent"):
    raise ValueError(f"implementation is {implementation!r}, expected 'chunked' or 'recurrent'.")
  C = 1 if implementation == "recurrent" else min(chunk, L)
  n = -(-L // C)
  # A factor of 0 forgets the document before; a padded token has a = 1 and x = 0.
  begins = jnp.zeros((B, L), bool) if segment_ids is None else changes(segment_ids)
  real = jnp.ones((B, L), bool)

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, n * C - L)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, n, C, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def one_chunk(h, xs):
    inputs, begins, real = xs
    a, x = elements(inputs)
    flag = lambda m: m.reshape(m.shape + (1,) * (a.ndim - 2))
    if segment_ids is not None:
      a = jnp.where(flag(begins), 0, a)
    if n * C != L:
      a, x = jnp.where(flag(real), a, 1), jnp.where(flag(real), x, 0)
    if C == 1:
      states = a * h[:, None] + x
    else:
      passed, states = lax.associative_scan(_combine, (a, x), axis=1)
      states = states + passed * h[:, None]
    return states[:, -1], readout(states, inputs)

  h, y = lax.scan(one_chunk, h0, jax.tree.map(split, (inputs, begins, real)))
  join = lambda y: jnp.moveaxis(y, 0, 1).reshape(B, n * C, *y.shape[3:])[:, :L]
  return jax.tree.map(join, y), h


def _combine(first, second):
  (a1, x1), (a2, x2) = first, second
  return a2 * a1, a2 * x1 + x2
