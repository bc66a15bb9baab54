"""Sampling of the next token from logits: greedy, temperature, top-k, top-p."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """Sampling settings; the default is greedy decoding."""

  temperature: float = 0.0  # 0: greedy (argmax)
  top_k: int | None = None  # sample from the k most likely tokens
  top_p: float | None = None  # nucleus sampling: from the fewest tokens with this total probability

  def validate(self):
    """Raise ValueError for invalid or contradictory settings."""
    if not 0 <= self.temperature < math.inf:
      raise ValueError(f"temperature is {self.temperature}, expected 0 or more.")
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(f"top_k is {self.top_k}, expected at least 1.")
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f"top_p is {self.top_p}, expected a probability in (0, 1].")
    for name in ("top_k", "top_p"):
      value = getattr(self, name)
      if self.temperature == 0 and value is not None:
        raise ValueError(
          f"{name} is {value}, but temperature 0 is greedy decoding: set a temperature (e.g. 0.8)"
          f" or leave {name} unset."
        )


def sample(logits: Float[Array, "B V"], how: Sampling, key) -> Int[Array, " B"]:
  """Sample one token per sequence; temperature is applied first, then top_k, then top_p."""
  how.validate()
  if how.temperature == 0:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits / how.temperature
  if how.top_k is not None and how.top_k < logits.shape[1]:
    threshold = jax.lax.top_k(logits, how.top_k)[0][:, -1:]
    logits = jnp.where(logits >= threshold, logits, -jnp.inf)
  if how.top_p is not None and how.top_p < 1:
    ordered = -jnp.sort(-logits, axis=-1)
    p = jax.nn.softmax(ordered, axis=-1)
    # A token is in the nucleus if more likely ones have less than top_p; the first always is.
    nucleus = jnp.cumsum(p, axis=-1) - p < how.top_p
    threshold = jnp.min(jnp.where(nucleus, ordered, jnp.inf), axis=-1, keepdims=True)
    logits = jnp.where(logits >= threshold, logits, -jnp.inf)
  return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
