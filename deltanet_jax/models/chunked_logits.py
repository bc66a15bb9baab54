"""Loss, predictions and log-probabilities from logits of a few tokens at a time.

Logits `[B L V]` are the largest array of a language model. Everything here scans over chunks of
tokens, so that only `[B chunk V]` exists at a time, in the backward pass too. With a large
vocabulary and a small model the head costs more than all layers: where only some targets are
scored, only their hidden states are multiplied by it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from deltanet_jax import sharding
from deltanet_jax.models.lm import LM
from deltanet_jax.ops.dtypes import accum_dtype


def chunk_size(length: int, at_most: int) -> int:
  """Return the largest divisor of the length that is at most `at_most`."""
  return next(n for n in range(min(at_most, length), 0, -1) if length % n == 0)


def scan_logits(
  model: LM,
  x: Float[Array, "B L D"],
  xs: Any,
  body: Callable[[Any, Array, Any], tuple[Any, Any]],
  init: Any,
  *,
  chunk: int,
  length_axis: str | None = None,
  remat: bool = False,
) -> tuple[Any, Any]:
  """Scan `body(carry, logits, xs) -> (carry, ys)` over chunks of tokens.

  Args:
    x: hidden states after the final norm.
    xs: pytree of arrays `[B L ...]`, chunked like x.
    chunk: tokens of each sequence per scan step; divides L.
    length_axis: mesh axis name of L ("length" if the sequence may be sharded, else None).
    remat: recompute the logits in the backward pass instead of saving them.

  Returns:
    The last carry, and the outputs `[B L ...]`.
  """
  B, L = x.shape[:2]
  # Outside the scan: inside, it would be gathered for forward, recomputation and backward of every
  # chunk, and its gradient scattered once per chunk.
  kernel = model.head_kernel()

  def step(carry, chunk):
    x, xs = chunk
    logits = sharding.constrain(model.logits(x, kernel), "batch", length_axis, "vocab")
    return body(carry, logits, xs)

  split = lambda y: jnp.moveaxis(y.reshape(B, L // chunk, chunk, *y.shape[2:]), 1, 0)
  join = lambda y: jnp.moveaxis(y, 0, 1).reshape(B, L, *y.shape[3:])
  step = jax.checkpoint(step) if remat else step
  carry, ys = lax.scan(step, init, jax.tree.map(split, (x, xs)))
  return carry, jax.tree.map(join, ys)


def target_positions(
  mask: Bool[Array, "B L"], most: int
) -> tuple[Int[Array, "B n"], Bool[Array, "B n"]]:
  """Return the first `most` positions of each sequence where the mask is set, and their validity.

  A sequence with fewer set positions is padded with position 0, marked invalid.
  """
  rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
  wanted = jnp.arange(most, dtype=jnp.int32)[None, :, None]
  # Compare and sum instead of a sort: compilers fuse and partition that well.
  match = (rank[:, None] == wanted) & mask[:, None]
  position = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, None]
  return jnp.where(match, position, 0).sum(axis=-1, dtype=jnp.int32), match.any(axis=-1)


def _gather(x: Array, positions: Int[Array, "B n"]) -> Array:
  """Gather x `[B L ...]` at positions along L."""
  positions = positions.reshape(*positions.shape, *(1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, positions, axis=1)


def _target_logits(logits: Float[Array, "B L V"], targets: Int[Array, "B L"]) -> Array:
  # Mask and sum over the vocabulary, not a lookup: that would gather a sharded vocabulary.
  vocab = jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None]
  return jnp.where(targets[..., None] == vocab, logits, 0).sum(axis=-1)


def batch_totals(
  model: LM,
  batch: dict[str, Array],
  loss_chunk: int,
  *,
  scored: int | None = None,
  count_correct: bool = False,
) -> dict[str, Array]:
  """Return the sum of -log p over the scored targets, and their number.

  Args:
    batch: a training batch has "dropout", keys for `LM.features`.
    loss_chunk: tokens of each sequence whose logits exist at a time; a divisor of the length, or
      more than it.
    scored: maximum number of scored targets per sequence; None if all may be.
    count_correct: also return how many scored targets are the argmax of their logits.
  """
  x, _ = model.features(batch["tokens"], batch["segment_ids"], dropout=batch.get("dropout"))
  x = sharding.constrain(x, "batch", "length", None)
  L = batch["tokens"].shape[1]
  xs, length_axis = (batch["targets"], batch["mask"]), "length"
  most = L if scored is None else scored
  if most > loss_chunk:
    most = -(-most // loss_chunk) * loss_chunk
  if most < L:
    positions, valid = target_positions(batch["mask"], most)
    x = _gather(sharding.constrain(x, "batch", None, None), positions)
    xs, L, length_axis = (_gather(batch["targets"], positions), valid), most, None

  def add_chunk(totals, logits, xs):
    targets, mask = xs
    target_logits = _target_logits(logits, targets)
    loss = jax.nn.logsumexp(logits, axis=-1) - target_logits
    new = dict(loss=totals["loss"] + jnp.where(mask, loss, 0).sum())
    if count_correct:
      correct = (target_logits >= logits.max(axis=-1)) & mask
      new["correct"] = totals["correct"] + correct.sum(dtype=jnp.int32)
    return new, None

  totals = dict(loss=jnp.zeros((), accum_dtype(x.dtype)))
  if count_correct:
    totals["correct"] = jnp.zeros((), jnp.int32)
  options = dict(chunk=min(loss_chunk, L), length_axis=length_axis, remat=True)
  totals, _ = scan_logits(model, x, xs, add_chunk, totals, **options)
  return totals | dict(targets=batch["mask"].sum(dtype=jnp.int32))


def predictions(
  model: LM, batch: dict[str, Array], max_targets: int, loss_chunk: int
) -> Int[Array, "B L"]:
  """Return the argmax of the logits at the scored targets, 0 at all other positions.

  Args:
    max_targets: at least the number of scored targets in any sequence.
    loss_chunk: of these, how many of each sequence have logits at a time.
  """
  x, _ = model.features(batch["tokens"], batch["segment_ids"])
  x = sharding.constrain(x, "batch", None, None)
  B, L = batch["mask"].shape
  chunk = min(max_targets, loss_chunk)
  positions, valid = target_positions(batch["mask"], -(-max_targets // chunk) * chunk)
  argmax = lambda _, logits, __: ((), jnp.argmax(logits, axis=-1).astype(jnp.int32))
  _, ids = scan_logits(model, _gather(x, positions), (), argmax, (), chunk=chunk)
  # Padding is scattered to index L, outside the sequence, and so dropped.
  index = jnp.arange(B)[:, None], jnp.where(valid, positions, L)
  return jnp.zeros((B, L), jnp.int32).at[index].set(ids, mode="drop")


def target_logprobs(
  model: LM, x: Float[Array, "B L D"], targets: Int[Array, "B L"], chunk: int = 64
) -> tuple[Float[Array, "B L"], Int[Array, "B L"]]:
  """Return log p of each target and the argmax there, from hidden states x.

  Args:
    chunk: tokens of a sequence whose logits exist at a time; all if it does not divide L.
  """
  L = targets.shape[1]

  def logprobs(_, logits, targets):
    logprob = _target_logits(logits, targets) - jax.nn.logsumexp(logits, axis=-1)
    return (), (logprob, jnp.argmax(logits, axis=-1).astype(jnp.int32))

  chunk = chunk if L % chunk == 0 else L
  return scan_logits(model, x, targets, logprobs, (), chunk=chunk)[1]
