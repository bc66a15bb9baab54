"""Where the targets of a row are that count: nothing else is multiplied by the head.

With a vocabulary of thousands the head of a small model costs more than all its layers.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def target_positions(
  mask: Bool[Array, "B L"], most: int
) -> tuple[Int[Array, "B n"], Bool[Array, "B n"]]:
  """Of each row the first `most` places that count, in order, and which of them there are.

  Where a row has fewer the place is 0.
  """
  rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
  wanted = jnp.arange(most, dtype=jnp.int32)[None, :, None]
  # Compared and summed, which compilers fuse and split well, rather than sorted.
  is_it = (rank[:, None] == wanted) & mask[:, None]
  place = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, None]
  return jnp.where(is_it, place, 0).sum(axis=-1, dtype=jnp.int32), is_it.any(axis=-1)
