"""Token shift: the previous token at every position."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.segments import segment_starts


def token_shift(
  x: Float[Array, "B L d"],
  *,
  state: Float[Array, "B d"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B L d"], Float[Array, "B d"]]:
  """Shift a sequence by one token: return x_{t-1} for every t, and the last token.

  Args:
    x: Inputs.
    state: The token before the first one, zeros if None; it belongs to the first segment.
    segment_ids: Segments of packed sequences; the first token of a segment is preceded by zeros.
  """
  first = jnp.zeros_like(x[:, :1]) if state is None else state.astype(x.dtype)[:, None]
  before = jnp.concatenate([first, x[:, :-1]], axis=1)
  if segment_ids is not None:
    before = jnp.where(segment_starts(segment_ids)[..., None], 0, before)
  return before, x[:, -1]
