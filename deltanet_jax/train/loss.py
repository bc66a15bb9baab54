"""The loss of a batch, with the logits of a few tokens at a time."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from deltanet_jax import sharding
from deltanet_jax.models import LM
from deltanet_jax.ops.dtypes import accum_dtype
from deltanet_jax.train.target_positions import target_positions


def batch_totals(
  model: LM,
  batch: dict[str, Array],
  loss_chunk: int,
  *,
  scored: int | None = None,
  count_correct: bool = False,
) -> dict[str, Array]:
  """Sum of -log p over the targets that count, and their number.

  Args:
    batch: with "dropout", keys for `LM.features`, it is one of training.
    loss_chunk: tokens of each row whose logits exist at a time, in the backward too; a divisor of
      the length, or more than it.
    scored: most targets of a row that count; None if it may be all of them.
    count_correct: also how many targets are the predict token.
  """
  x, _ = model.features(batch["tokens"], batch["segment_ids"], dropout=batch.get("dropout"))
  x = sharding.constrain(x, "batch", "length", None)
  B, L = batch["tokens"].shape
  xs, length = (x, batch["targets"], batch["mask"]), "length"
  most = L if scored is None else scored
  if most > loss_chunk:
    most = -(-most // loss_chunk) * loss_chunk
  if most < L:
    place, there = target_positions(batch["mask"], most)
    x = sharding.constrain(x, "batch", None, None)
    x = jnp.take_along_axis(x, place[..., None], axis=1)
    targets = jnp.take_along_axis(batch["targets"], place, axis=1)
    xs, L, length = (x, targets, there), most, None
  chunks = max(L // loss_chunk, 1)
  # Here, not in each chunk, where it would be gathered three times and its gradient scattered.
  kernel = model.head_kernel()

  @jax.checkpoint
  def add_chunk(totals, xs):
    x, targets, mask = xs
    logits = sharding.constrain(model.logits(x, kernel), "batch", length, "vocab")
    # A sum over the vocabulary, not a lookup: that would gather it where it is split.
    vocab = jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None]
    right = jnp.where(targets[..., None] == vocab, logits, 0).sum(axis=-1)
    loss = jax.nn.logsumexp(logits, axis=-1) - right
    new = dict(loss=totals["loss"] + jnp.where(mask, loss, 0).sum())
    if count_correct:
      hit = (right >= logits.max(axis=-1)) & mask
      new["correct"] = totals["correct"] + hit.sum(dtype=jnp.int32)
    return new, None

  split = lambda y: jnp.moveaxis(y.reshape(B, chunks, L // chunks, *y.shape[2:]), 1, 0)
  xs = jax.tree.map(split, xs)
  totals = dict(loss=jnp.zeros((), accum_dtype(x.dtype)))
  if count_correct:
    totals["correct"] = jnp.zeros((), jnp.int32)
  totals, _ = lax.scan(add_chunk, totals, xs)
  return totals | dict(targets=batch["mask"].sum(dtype=jnp.int32))
