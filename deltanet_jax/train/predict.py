"""The predict token at the targets that count, with logits nowhere else."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from deltanet_jax import sharding
from deltanet_jax.models import LM
from deltanet_jax.train.target_positions import target_positions


def predict(model: LM, batch: dict[str, Array], counting: int, loss_chunk: int) -> Array:
  """`[B L]` ids; 0 where a row has none.

  Args:
    counting: at least as many as the targets that count in any row.
    loss_chunk: of these, how many of each row have logits at a time.
  """
  x, _ = model.features(batch["tokens"], batch["segment_ids"])
  x = sharding.constrain(x, "batch", None, None)
  mask, kernel = batch["mask"], model.head_kernel()
  B, L = mask.shape
  size = min(counting, loss_chunk)
  chunks = -(-counting // size)
  place, there = target_positions(mask, chunks * size)

  def one(place):
    logits = model.logits(jnp.take_along_axis(x, place[..., None], axis=1), kernel)
    logits = sharding.constrain(logits, "batch", None, "vocab")
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)

  ids = lax.map(one, jnp.moveaxis(place.reshape(B, chunks, size), 1, 0))
  ids = jnp.moveaxis(ids, 0, 1).reshape(B, chunks * size)
  # What there is not goes nowhere: outside the row.
  at = jnp.arange(B)[:, None], jnp.where(there, place, L)
  return jnp.zeros((B, L), jnp.int32).at[at].set(ids, mode="drop")
