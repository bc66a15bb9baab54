"""NaN and infinities of a token reach what may see it, and nothing else.

A masked entry of a product is a factor of 0, and 0 NaN is NaN: one token would spoil those before
it, and other segments. So such numbers enter products as zeros, and what may see them is set to
NaN afterwards; that is known from tokens and segments alone.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from deltanet_jax.ops.dtypes import upcast
from deltanet_jax.ops.segments import segment_starts


@jax.custom_jvp
def zero_nonfinite(x: Array) -> Array:
  """x with zeros for what is not finite; its derivative is that of x, so that no mask is kept."""
  return jnp.where(jnp.isfinite(x), x, 0)


zero_nonfinite.defjvp(lambda primals, tangents: (zero_nonfinite(*primals), *tangents))


def zero_nonfinite_gate(g: Array | None) -> Array | None:
  """Log decays with zeros for what is none; minus infinity, which forgets everything, stays."""
  return None if g is None else _zero_nonfinite_gate(g)


@jax.custom_jvp
def _zero_nonfinite_gate(g):
  return jnp.where(g < jnp.inf, g, 0)


_zero_nonfinite_gate.defjvp(lambda primals, tangents: (_zero_nonfinite_gate(*primals), *tangents))


def has_nonfinite(*arrays: Array, gate: Array | None = None) -> Bool[Array, "B L ..."]:
  """Which tokens and heads of arrays `[B L H ..]` hold a number that is not finite.

  Sums of zeros say it too, and on a CPU they cost nothing beside a chunk's products; `all` of
  isfinite took a tenth of linear attention's time.

  Args:
    gate: log decays, which may be minus infinity.
  """
  if gate is not None:
    arrays = (*arrays, jnp.where(jnp.isneginf(gate), 0, gate))
  sums = ((0 * upcast(x)).sum(axis=tuple(range(3, x.ndim))) for x in arrays)
  return functools.reduce(jnp.logical_or, (jnp.isnan(total) for total in sums))


def nonfinite_reach(
  bad: Bool[Array, "B L H"],
  segments: Int[Array, "B L"] | None,
  *,
  before: Bool[Array, "B H"] | None = None,
  window: int | None = None,
) -> Bool[Array, "B L H"]:
  """Which tokens see a `bad` one, themselves included: of their segment, at most `window` back.

  Args:
    before: heads whose state before the first token, of the first segment, is bad.
  """
  index = jnp.arange(bad.shape[1], dtype=jnp.int32)[None, :, None]
  last = lax.cummax(jnp.where(bad, index, -1), axis=1)
  first = jnp.zeros_like(index)
  if segments is not None:
    first = lax.cummax(jnp.where(segment_starts(segments)[..., None], index, 0), axis=1)
  if window is not None:
    first = jnp.maximum(first, index - window + 1)
  sees = last >= first
  return sees if before is None else sees | ((first == 0) & before[:, None])


def propagate_nonfinite(o: Array, S: Array, seen: Bool[Array, "B L H"], own: Bool[Array, "B L #H"]):
  """o `[B L H ..]` with NaN where `seen` or `own`, and S `[B H ..]` where the last token is."""
  upcast = lambda flags, x: flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))
  return (
    jnp.where(upcast(seen | own, o), jnp.nan, o),
    jnp.where(upcast(seen[:, -1], S), jnp.nan, S),
  )
