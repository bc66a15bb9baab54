"""Log-probabilities of given tokens, one number for each, with the logits of a few at a time."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from deltanet_jax import sharding
from deltanet_jax.models import LM


def target_logprobs(
  model: LM, x: Float[Array, "B L D"], targets: Int[Array, "B L"], chunk: int = 64
) -> tuple[Float[Array, "B L"], Int[Array, "B L"]]:
  """(log p of each target, the predict token there) from the features of the tokens before.

  Args:
    chunk: tokens of a row whose logits exist at a time; of a length that it does not divide all.
  """
  B, L = targets.shape
  chunk = chunk if L % chunk == 0 else L
  kernel = model.head_kernel()

  def one(xs):
    x, targets = xs
    logits = sharding.constrain(model.logits(x, kernel), "batch", None, "vocab")
    # A sum over the vocabulary, not a lookup: that would gather it where it is split.
    vocab = jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None]
    right = jnp.where(targets[..., None] == vocab, logits, 0).sum(axis=-1)
    predict = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return right - jax.nn.logsumexp(logits, axis=-1), predict

  split = lambda y: jnp.moveaxis(y.reshape(B, L // chunk, chunk, *y.shape[2:]), 1, 0)
  found = lax.map(one, (split(x), split(targets)))
  logprobs, predict = (jnp.moveaxis(y, 0, 1).reshape(B, L) for y in found)
  return logprobs, predict
