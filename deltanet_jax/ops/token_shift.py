"""Token shift: every token beside the one before it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanet_jax.ops.composable import composable
from deltanet_jax.ops.segments import segment_starts


@composable()
def token_shift(
  x: Float[Array, "B L d"],
  *,
  state: Float[Array, "B d"] | None = None,
  segment_ids: Int[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B L d"], Float[Array, "B d"]]:
  """x_{t-1} for every t, and the last token.

  Args:
    state: the token before the first one, zeros if None; of the first segment of a row.
    segment_ids: the first token of a segment has zeros before it.
  """
  first = jnp.zeros_like(x[:, :1]) if state is None else state.astype(x.dtype)[:, None]
  before = jnp.concatenate([first, x[:, :-1]], axis=1)
  if segment_ids is not None:
    before = jnp.where(segment_starts(segment_ids)[..., None], 0, before)
  return before, x[:, -1]
